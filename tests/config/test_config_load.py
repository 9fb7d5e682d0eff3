"""Configuration from files and overrides: values, precedence, and what the errors say."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from whet.config import Config, ConfigError, load_config, read_tree, validated


class Mode(StrEnum):
    NONE = "none"
    FAST = "fast"


class Optim(Config):
    lr: float = Field(default=1e-5, gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = (0.9, 0.999)
    schedule: Literal["none", "cosine"] | None = "cosine"


class Sampling(Config):
    temperature: float = 1.0
    top_k: int = 0


class EvalSet(Config):
    path: str | list[str]
    """Where its rows are."""
    limit: int | None = 100
    sampling: Sampling = Sampling(temperature=0.25)


class Evaluate(Config):
    sets: dict[str, EvalSet] = Field(default_factory=dict)
    sampling: Sampling = Sampling(temperature=0.0)
    every: int = 10


class MathReward(Config):
    kind: Literal["math"]
    tolerance: float = 0.0


class ExactReward(Config):
    kind: Literal["exact"]
    ignore_case: bool = False


class Run(Config):
    name: str
    seed: int = 0
    output: Path = Path("runs")
    optim: Optim = Optim()
    evaluate: Evaluate = Evaluate()
    reward: Annotated[MathReward | ExactReward, Field(discriminator="kind")] | None = None
    judge: str | Sampling | None = None
    stages: list[Sampling] = Field(default_factory=list)
    mode: Mode | None = None
    extra: dict[str, Any] = Field(default_factory=dict)
    shares: dict[str, float] = Field(default_factory=dict)
    keep: bool | int = False
    label_key: str | None = "label"

    @model_validator(mode="after")
    def _check(self) -> Run:
        if self.seed == 13:
            raise ValueError("seed 13 brings bad luck; use another")
        return self


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def problems(path: Path | None, overrides: list[str]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        load_config(Run, path, overrides)
    return error.value.problems


def one_problem(*overrides: str) -> str:
    (problem,) = problems(None, ["name=x", *overrides])
    return problem


def test_base_file_and_overrides_are_layers(tmp_path):
    path = write(tmp_path, 'name = "file"\nseed = 2\n[optim]\nlr = 0.25\n')
    base = {"name": "base", "output": "there", "optim": {"betas": [0.5, 0.75], "lr": 1.0}}
    config = load_config(Run, path, ["seed=3", "evaluate.every = 7"], base=base)
    assert (config.name, config.seed, config.output) == ("file", 3, Path("there"))
    assert config.optim == Optim(lr=0.25, betas=(0.5, 0.75))
    assert config.evaluate.every == 7
    assert base["optim"] == {"betas": [0.5, 0.75], "lr": 1.0}


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("seed=5", "seed", 5),
        ("name=a=b", "name", "a=b"),
        ("name=2024", "name", "2024"),
        ("name=1e5", "name", "1e5"),
        ("name=true", "name", "true"),
        ("name=none", "name", "none"),
        ('name="quoted # text"', "name", "quoted # text"),
        ("name=5 # no comment", "name", "5 # no comment"),
        ("name=1, 2", "name", "1, 2"),
        ("name=1]\nseed=[2", "name", "1]\nseed=[2"),
        ("name=", "name", ""),
        ("name=data/train.jsonl@[:10]", "name", "data/train.jsonl@[:10]"),
        ("optim.betas=[0.1, 0.2]", "optim", Optim(betas=(0.1, 0.2))),
        ("optim={lr=0.5}", "optim", Optim(lr=0.5)),
        ("optim.schedule=none", "optim", Optim(schedule="none")),
        ("mode=none", "mode", Mode.NONE),
        ("label_key=none", "label_key", None),
        ("label_key=null", "label_key", None),
        ("stages=[{top_k=4}]", "stages", [Sampling(top_k=4)]),
        ('extra."a.b"=none', "extra", {"a.b": "none"}),
        ("judge=someone", "judge", "someone"),
        ("judge.top_k=4", "judge", Sampling(top_k=4)),
    ],
)
def test_an_override_is_read_as_its_key_wants_it(override, key, value):
    assert getattr(load_config(Run, None, ["name=x", override]), key) == value


def test_overrides_make_tables_and_unset_optional_keys(tmp_path):
    path = write(tmp_path, 'name = "x"\nlabel_key = "none"\n[evaluate.sets.a]\npath = "a.jsonl"\nlimit = 5\n')
    config = load_config(Run, path, ["evaluate.sets.gsm8k.path=[a, b]", "evaluate.sets.a.limit=null"])
    assert config.label_key is None
    assert config.evaluate.sets == {"a": EvalSet(path="a.jsonl", limit=None), "gsm8k": EvalSet(path="[a, b]")}


def test_an_override_replaces_an_unset_table():
    assert load_config(Run, None, ["name=x", "judge=none", "judge.top_k=1"]).judge == Sampling(top_k=1)


def test_setting_one_key_keeps_the_defaults_that_the_owner_gives():
    sets = ["evaluate.sets.a.path=x", "evaluate.sets.a.sampling.top_k=4"]
    config = load_config(Run, None, ["name=x", "evaluate.sampling.top_k=3", *sets])
    assert config.evaluate.sampling == Sampling(temperature=0.0, top_k=3)
    assert config.evaluate.sets["a"].sampling == Sampling(temperature=0.25, top_k=4)


def test_configurations_are_frozen():
    config = load_config(Run, None, ["name=x"])
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 2


def test_a_misspelled_word_names_the_nearest():
    assert one_problem("optim.schedule=cosin").endswith("expected one of 'none' or 'cosine'; did you mean cosine?")
    assert one_problem("optim.schedule=Cosine").endswith("; did you mean cosine?")
    assert one_problem("optim.schedule=exponential").endswith("expected one of 'none' or 'cosine'")
    assert one_problem("optim.schedule=3").endswith("expected one of 'none' or 'cosine'")


def test_a_misspelled_key_names_the_nearest_and_the_place_of_its_name():
    problem = one_problem("optim.learning_pace=1", "optim.lr=1")
    assert "optim.learning_pace: unknown key" in problem and "lr, betas, schedule" in problem
    assert "did you mean optim.betas?" in one_problem("optim.beta=1")
    assert "there is optim.lr" in one_problem("lr=1")
    problem = one_problem("evaluate.sets.gsm8k.path=x", "evaluate.sets.gsm8k.limits=3")
    assert "evaluate.sets.gsm8k.limits" in problem and "did you mean evaluate.sets.gsm8k.limit?" in problem
    assert (
        "there is evaluate.sets.<name>.sampling.top_k and evaluate.sampling.top_k and judge.top_k and stages[].top_k"
        in one_problem("top_k=1")
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed=1.5", "seed = 1.5: expected an integer"),
        ("seed=abc", 'seed = "abc": expected an integer'),
        ("seed=true", "seed = true: expected an integer"),
        ("optim.lr=true", "optim.lr = true: expected a number"),
        ("evaluate.sets.a={path='x', limit=false}", "evaluate.sets.a.limit = false: expected an integer"),
        ("optim.betas=[true, 0.9]", "optim.betas[0] = true: expected a number"),
        ("shares={a=0.5, b=true}", "shares.b = true: expected a number"),
        ("optim.lr=fast", 'optim.lr = "fast": expected a number'),
        ("optim.lr=-1.0", "optim.lr = -1.0: expected more than 0"),
        ("optim.schedule=linear", "optim.schedule = \"linear\": expected one of 'none' or 'cosine'"),
        ("optim.betas=[1, 2, 3]", "optim.betas = [1, 2, 3]: expected a length of at most 2"),
        ("optim=3", "optim = 3: expected a table"),
        ("evaluate.sets.a=x.jsonl", 'evaluate.sets.a = "x.jsonl": expected a table; did you mean evaluate.sets.a.path=x.jsonl?'),
        ("optim=adam", 'optim = "adam": expected a table'),
        ("evaluate.sets.a.path=[1]", "evaluate.sets.a.path[0] = 1: expected text"),
        ("evaluate.sets.a.path={x=1}", "evaluate.sets.a.path = {x = 1}: expected text or a list"),
        ("evaluate.sets.a.limit=3", "evaluate.sets.a.path: is required and not set (text | list of text: Where its"),
        ("reward.kind=judge", 'reward.kind = "judge": expected one of math, exact'),
        ("reward={kind='math', tolerance='x'}", 'reward.tolerance = "x": expected a number'),
        ("judge={top_k='x'}", 'judge.top_k = "x": expected an integer'),
        ("judge=[]", "judge = []: expected text or a table"),
        ("stages=[{}, {top_k=0.5}]", "stages[1].top_k = 0.5: expected an integer"),
        ("seed=13", "seed 13 brings bad luck; use another"),
    ],
)
def test_a_wrong_value_says_what_was_given_and_expected(override, expected):
    problem = one_problem(override)
    assert expected in problem
    assert "pydantic" not in problem and "Input" not in problem and "Value error" not in problem


def test_true_stays_true_where_it_may_stand():
    config = load_config(Run, None, ["name=x", "keep=true", "extra={a=true, b=[true, 1]}"])
    assert config.keep is True and config.extra == {"a": True, "b": [True, 1]}


def test_every_problem_is_listed_at_once(tmp_path):
    path = write(tmp_path, "seed = 'a'\nsede = 1\n[optim]\nlr = 'b'\n")
    with pytest.raises(ConfigError) as error:
        load_config(Run, path, [])
    text = str(error.value)
    assert text.startswith(f"{path}: 4 problems")
    assert len(error.value.problems) == 4
    assert all(key in text for key in ("name: is required", 'seed = "a"', "sede: unknown key", 'optim.lr = "b"'))


@pytest.mark.parametrize(("text", "line"), [("a = 1\nb = = 2\n", 2), ('a = 1\n\nb = "open', 3), ("a = 1\na = 2\n", 2)])
def test_a_syntax_error_names_its_line(tmp_path, text, line):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=f"run.toml:{line}: not valid TOML"):
        load_config(Run, path)


@pytest.mark.parametrize("name", ["run.json", "run.toml"])
def test_json_is_told_with_the_same_in_toml(tmp_path, name):
    path = tmp_path / name
    path.write_text('{"name": "x",\n "judge": null, "optim": {"lr": 1e-4}}\n')
    with pytest.raises(ConfigError, match=rf"{name}: whet reads TOML, not JSON; the same as .*run\.toml:") as error:
        load_config(Run, path)
    shown = str(error.value).partition("run.toml:\n\n")[2]
    path.write_text(shown)
    assert load_config(Run, path.rename(tmp_path / "new.toml")).optim.lr == 1e-4
    path.write_text('{"name": "x",}\n')
    told = "not JSON; write tables in brackets" if name == "run.json" else "not valid TOML"
    with pytest.raises(ConfigError, match=told):
        load_config(Run, path)


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match=r"no configuration file .*missing\.toml"):
        load_config(Run, tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(Run, tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 8\)"):
        load_config(Run, tmp_path / "latin.toml")


@pytest.mark.parametrize("override", ["seed", "=3", "a b=3", "a..b=3", "a\nb=3"])
def test_an_override_without_a_key_is_refused(override):
    with pytest.raises(ConfigError, match="override"):
        load_config(Run, None, [override])


def test_an_override_below_a_value_is_refused():
    with pytest.raises(ConfigError, match=r'cannot set name\.x: name is "abc", not a table'):
        load_config(Run, None, ["name=abc", "name.x=1"])


def test_a_tree_is_what_the_file_and_the_overrides_say_before_any_model_looks(tmp_path):
    path = write(tmp_path, "[optim]\nlr = 1\n[anything]\nx = [1]\n")
    assert read_tree(path, ["optim.lr=2e-3", "new.key=word"]) == {
        "optim": {"lr": 2e-3},
        "anything": {"x": [1]},
        "new": {"key": "word"},
    }
    with pytest.raises(ConfigError, match="override"):
        read_tree(path, ["nonsense"])


def test_a_key_that_is_in_many_places_is_told_with_the_keys_of_its_own_table():
    class Named(Config):
        name: str = ""

    class Tables(Config):
        a: Named = Named()
        b: Named = Named()
        c: Named = Named()
        d: Named = Named()
        e: Named = Named()
        optim: Optim = Optim()

    with pytest.raises(ConfigError) as told:
        load_config(Tables, None, ["optim.name=x"])
    assert str(told.value) == "optim.name: unknown key; the keys here are lr, betas, schedule"


def test_settings_in_anothers_table_are_told_as_every_other_with_where_they_are():
    assert validated(Optim, {"lr": 1}, "the options") == Optim(lr=1)
    with pytest.raises(ConfigError) as told:
        validated(Optim, {"lr": "fast", "beta": 1}, "the options")
    assert told.value.problems == ('the options: lr = "fast": expected a number', "the options: beta: unknown key; did you mean betas?")


def test_a_list_that_is_set_to_its_only_item_is_told_how_to_write():
    assert one_problem("optim.betas=0.9") == "optim.betas = 0.9: expected a list; write optim.betas=[0.9]"
