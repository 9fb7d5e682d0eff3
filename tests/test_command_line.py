"""The command line as a person meets it: what is typed in the wrong form, secrets, readers that go away, versions and help."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from whet.cli import main
from whet.config import Config, ConfigError, load_config
from whet.typed import check_typed

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["reward.name", "math"], "write reward.name=math"),
        (["--reward.name=math"], "without dashes, as key=value: reward.name=math"),
        (["--reward.name", "math"], "without dashes, as key=value: reward.name=math"),
        (["--num_rollouts", "5"], "num_rollouts=5"),
        (["lonely"], "write lonely=VALUE"),
        (["WANDB_API_KEY=abc"], "WANDB_API_KEY is an environment variable"),
        (["HF_TOKEN=hf_abcdefghijABCDEFGHIJ"], "HF_TOKEN is an environment variable"),
        (["CUDA_VISIBLE_DEVICES=0"], "is an environment variable"),
        (["engine.api_key=abc123"], "a secret does not belong on the command line"),
        (["reward.options.api_key=abc123"], "a secret does not belong on the command line"),
        (["--engine.api_key", "abc123"], "engine.api_key=VALUE"),
        (["engine.api_key", "abc123"], "engine.api_key=VALUE"),
        (["reward.options.judge=sk-abcdefghijklmnop"], "a secret does not belong on the command line"),
        (["reward.options.url=https://me:pass123@host/v1"], "a secret does not belong on the command line"),
    ],
)
def test_what_is_typed_in_the_wrong_form_is_told_and_no_secret_is_repeated(typed, words):
    with pytest.raises(ConfigError) as told:
        check_typed(None, typed)
    assert words in str(told.value)
    assert not any(secret in str(told.value) for secret in ("abc", "abcdefghij", "pass123"))


@pytest.mark.parametrize(
    "typed",
    ["reward.name=math", "reward.options.api_key_env=OPENAI_API_KEY", "data.label_key=answer", "rollout.max_tokens=9", "a.b={c=1}"],
)
def test_settings_are_let_through(typed):
    check_typed(None, [typed])


def test_the_file_comes_first():
    with pytest.raises(ConfigError, match=r"the TOML file comes first.*reward\.name=math"):
        check_typed(Path("reward.name=math"), ["run.toml"])


class Table(Config):
    project: str = "whet"


class Settings(Config):
    name: str = "x"
    table: Table | None = None


def test_yaml_is_told_in_toml(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("name: y\nseed: null\ntable:\n  project: mine\n")
    with pytest.raises(ConfigError) as told:
        load_config(Settings, path)
    text = str(told.value).split("run.toml:\n\n")[1]
    (tmp_path / "run.toml").write_text(text)
    assert load_config(Settings, tmp_path / "run.toml") == Settings(name="y", table=Table(project="mine"))
    for content in ("- 1\n- 2\n", "a: [", "x: !!python/object:os.system {}"):
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"reads TOML, not YAML; write tables in brackets"):
            load_config(Settings, path)


def test_a_table_that_is_set_to_true_is_told_how_to_write():
    with pytest.raises(ConfigError, match=r"table = true: expected a table: write table=\{\} for .* or set its keys \(project\)"):
        load_config(Settings, None, ["table=true"])
    assert load_config(Settings, None, ["table={}"]).table == Table()


def run(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["whet", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code  # type: ignore[return-value]


@pytest.mark.parametrize("arguments", [("--version",), ("-h",), ("train", "-h"), ("version",)])
def test_versions_and_help(monkeypatch, capsys, arguments):
    assert run(monkeypatch, *arguments) == 0
    assert "whet" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "sft", "evaluate", "check", "generate"])
def test_every_command_that_takes_settings_looks_at_what_is_typed(monkeypatch, capsys, tmp_path, command):
    (tmp_path / "run.toml").write_text("")
    for typed in ("--reward.name=math", "engine.api_key=abc123"):
        assert run(monkeypatch, command, str(tmp_path / "run.toml"), typed) == 2
        told = capsys.readouterr().err
        assert ("without dashes" in told or "secret" in told) and "abc123" not in told


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("plan Qwen/x --gpus 8", "there is no option --gpus of whet plan; did you mean --devices?"),
        ("plan Qwen/x --gpus=8", "did you mean --devices?"),
        ("show runs/x --wrost", "there is no option --wrost of whet show; did you mean --worst?"),
        ("models get smollm2 --dir x", "there is no option --dir of whet models get; did you mean --to?"),
        ("report runs/x --zip y", "there is no option --zip of whet report; it has --output, --help"),
        ("train run.toml --clip-high 0.3", "--clip-high; settings are written without dashes, as key=value: algo.clip_high=0.3\n"),
        ("train run.toml --reward math", "as key=value: reward=math"),
        ("train run.toml --gpus 8", "there is no option --gpus; in whet it is train.parallel"),
        ("train run.toml --xyzw 8", "there is no option --xyzw; no setting is named like it"),
    ],
)
def test_an_option_that_there_is_not_is_answered_with_the_nearest(monkeypatch, capsys, typed, answer):
    assert run(monkeypatch, *typed.split()) == 2
    assert answer in capsys.readouterr().err


def test_options_of_a_command_are_let_through(monkeypatch, capsys):
    assert run(monkeypatch, "plan", "--help") == 0
    assert run(monkeypatch, "plan", "no/such/folder", "--devices", "8", "--no-offload") == 2
    assert "no option" not in capsys.readouterr().err


def test_every_setting_is_listed_once_or_those_of_one_table(monkeypatch, capsys):
    def listed(*arguments):
        monkeypatch.setattr(sys, "argv", ["whet", "train", "--keys", *arguments])
        main()
        return re.findall(r"^([\w.<>\[\]]+)  \(.*?\)(?:  for (.*))?$", capsys.readouterr().out, re.MULTILINE)

    every = listed()
    assert len(every) <= 360 and len(set(every)) == len(every)
    tables = [path.partition(".")[0] for path, _ in every]
    assert [table for table, _ in itertools.groupby(tables)] == list(dict.fromkeys(tables)), "a table's settings stand together"
    assert listed("algo") == [(path, kinds) for path, kinds in every if path.startswith("algo")]
    assert ("algo.gamma", "reinforce_plus_plus, ppo") in every and ("algo.clip_low", "") in every
    ppo = dict(listed("algo.ppo"))
    assert {"algo", "algo.name", "algo.lam", "algo.clip_low", "algo.correction.veto"} <= ppo.keys() and "algo.align" not in ppo
    assert listed("train.optim.lr") == [("train.optim.lr", "")]
    assert run(monkeypatch, "train", "--keys", "algo.pppo") == 2
    assert "there is no setting 'algo.pppo'; did you mean algo.ppo" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("train", "--keys"), ("--help",), ("version",), ("doctor",), ("train", "--help"), ("--version",)])
def test_a_reader_that_goes_away_is_no_error(arguments):
    """Its end of the pipe is closed before the first line."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "whet", *arguments]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=120, check=False)
    finally:
        os.close(writing)
    assert done.stderr == "", done.stderr
    assert done.returncode in (0, 1, 141)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (("--config", "run.toml"), "there is no option --config; the TOML file is named without one: whet COMMAND CONFIG.toml"),
        (("run.toml", "more.toml"), "one TOML file is read, and more.toml is a second one"),
        (("run.toml", "data.train="), 'data.train = "": expected a length of at least 1'),
        (("run.toml", "reward=math"), 'reward = "math": expected a table; did you mean reward.name=math?'),
        (("run.toml", "model=base"), "did you mean model.path=base?"),
        (("run.toml", "engine.kind=vllm"), "engine.kind: unknown key; the keys here are "),
    ],
)
def test_what_is_typed_wrongly_is_told_with_how_it_is_written(monkeypatch, capsys, tmp_path, typed, told):
    (tmp_path / "run.toml").write_text('num_rollouts = 1\nmodel.path = "m"\ndata.train = "d.jsonl"\n')
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "train", *typed) == 2
    assert told in capsys.readouterr().err


def test_a_file_of_another_command_is_told_so(monkeypatch, capsys, tmp_path):
    (tmp_path / "run.toml").write_text('num_rollouts = 1\nmodel.path = "m"\ndata.train = "d.jsonl"\nreward.name = "math"\n')
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "sft", "run.toml") == 2
    assert "  its keys are those of `whet train`, not of `whet sft`\n" in capsys.readouterr().err
    assert run(monkeypatch, "train", "run.toml", "num_rollout=1", "modl=1") == 2
    assert "its keys are those" not in capsys.readouterr().err


def test_a_warning_of_whets_own_is_told_in_words_and_any_other_with_its_place():
    code = (
        "import sys, warnings; sys.argv = ['whet', 'version']\n"
        "from whet import cli\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "warnings.warn_explicit('slow', UserWarning, cli.__file__, 1)\nwarnings.warn_explicit('other', UserWarning, '/x/y.py', 7)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr == "warning: slow\n/x/y.py:7: UserWarning: other\n"
