"""Settings, and what the command line says of them, are read without the heavy libraries, some of which take seconds to load."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "ray", "pyarrow", "numpy", "sympy")
LIGHT = [
    "whet",
    "whet.cli",
    "whet.settings.rl",
    "whet.settings.supervised",
    "whet.serve.settings",
    "whet.evaluate.config",
    "whet.build.run_dirs",
    "whet.api.calls",
    "whet.api.run",
]
GOOD = (
    '[model]\npath = "model"\n[data]\ntrain = "rows.jsonl"\n[reward]\nname = "math"\n'
    "[batch]\nprompts_per_rollout = 2\nsamples_per_prompt = 2\n"
)


@pytest.mark.parametrize("module", LIGHT)
def test_importing_loads_nothing_heavy(module):
    script = f"import sys, {module}; print(*sorted({set(HEAVY)} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of settings, and in `broken` packages of the heavy libraries' names that cannot be imported."""
    made = tmp_path_factory.mktemp("light")
    for name in HEAVY:
        package = made / "broken" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"raise ImportError('{name} is broken here')\n")
    (made / "good.toml").write_text(GOOD)
    for name, files in (("model", ("config.json", "tokenizer.json")), ("weights", ("config.json",)), ("texts", ("tokenizer.json",))):
        (made / name).mkdir()
        for file in files:
            (made / name / file).write_text("{}")
    (made / "rows.jsonl").write_text('{"prompt": "What is 2 + 3?", "label": "5"}\n')
    (made / "odd.jsonl").write_text('{"question": "What is 2 + 3?", "answer": "5"}\n')
    (made / "empty.jsonl").write_text("")
    (made / "torn.jsonl").write_text('{"prompt": "What is 2 + 3?", "label": "5"}\n{"prompt": "What')
    (made / "uneven.jsonl").write_text('{"prompt": "What is 2 + 3?", "label": "5"}\n{"prompt": "What is 4 + 3?"}\n')
    shutil.copytree(made / "model", made / "short")
    (made / "short/config.json").write_text('{"max_position_embeddings": 512}')
    (made / "my.py").write_text("def compute_score(data_source, solution_str): ...\ndef bare(x: int): ...\n")
    (made / "math").mkdir()
    (made / "math/config.toml").write_text("")
    (made / "typo.toml").write_text("num_rolouts = 3\n" + GOOD)
    (made / "torn.toml").write_text(GOOD + "[model\n")
    return made


def light_python(folder, *arguments):
    path = os.pathsep.join([str(folder / "broken"), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, cwd=folder, env=env)


FORKS = """
import importlib, json, os, sys, tempfile, traceback
import whet.cli

for name in sys.argv[2:]:
    importlib.import_module(name)

def start(typed):
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    pid = os.fork()
    if not pid:
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        sys.argv, status = ["whet", *typed.split()], 1
        try:
            whet.cli.main()
            status = 0
        except SystemExit as end:
            status = end.code
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [status, *(file.seek(0) or file.read() for file in files)]

print(json.dumps({typed: start(typed) for typed in json.loads(sys.argv[1])}))
"""
"""Commands, each in a fork of a process that has imported what is light and cannot import what is heavy."""


@pytest.fixture(scope="module")
def ended(folder):
    """Exit status, standard output and standard error of every command below."""
    typed = [*(typed for typed, _ in TOLD), *(typed for typed, _ in HELP), *(typed for typed, _ in CHECKED), *NEEDS]
    done = light_python(folder, "-c", FORKS, json.dumps(typed), *LIGHT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


TOLD = [
    *((f"{command} typo.toml", "num_rolouts: unknown key") for command in ("train", "sft", "dpo", "rm", "evaluate", "generate")),
    ("train missing.toml", "missing.toml"),
    ("train torn.toml", "torn.toml"),
    ("train good.toml num_rollouts=-1", "num_rollouts"),
    ("train good.toml algo.name=grop", "algo"),
    ("sft good.toml", "`whet train`"),
    ("train good.toml rollout.temperature=0", "rollout.temperature=0 cannot be trained on"),
    ("train good.toml batch.prompts_per_rollout=3 batch.samples_per_step=4", "batch: "),
    ("train good.toml checkpoint.best=eval/other/mean@1", "checkpoint.best"),
    ("serve model prot=80", "prot"),
    ("serve model --config missing.toml", "missing.toml"),
    ("serve model port=seventy", "port"),
    ("score replies.jsonl reward=math reward.timeot_s=3", "reward.timeot_s"),
    ("convert nowhere there", "there is no nowhere"),
    ("convert good.toml typo.toml", "typo.toml is there already"),
    ("train good.toml model.path=modell", "there is no model folder 'modell'"),
    ("train good.toml data.train=rows.json", "did you mean rows.jsonl"),
    ("train good.toml data.train=odd.jsonl", "the columns are question, answer"),
    ("train good.toml data.train=good.toml", "expected a file that ends in"),
    ("train good.toml data.train=torn.jsonl", "torn.jsonl:2: not valid JSON at column 12"),
    ("train good.toml data.train=uneven.jsonl", "uneven.jsonl:2: there is no column 'label'"),
    ("train good.toml data.train=empty.jsonl", "there are no rows in empty.jsonl"),
    ("train good.toml run_dir=my.py", "run_dir: my.py is a file"),
    ("train good.toml run_dir=model", "run_dir: model is the folder of a model"),
    ("train good.toml run_dir=math", "run_dir: math has a config.toml of yours"),
    ("train good.toml run_dir=.", "would have the trained model in model"),
    ("train math", "did you mean math/config.toml?"),
    ("train good.toml reward.name=my.py", "name a function in it, my.py:FUNCTION"),
    ("train good.toml env.tools=[calculator]", "write 'env.tools=[\"calculator\"]'"),
    ("train good.toml reward.name=maths", "did you mean math"),
    ("train good.toml reward.name=my.py:compute_score", "cannot be called as f(trajectory)"),
    ("train good.toml env.name=tools env.tools=[\"my.py:bare\"]", "has no docstring"),
    ("train good.toml control.filters=[{name=\"length\",options={max_token=3}}]", "length: options.max_token: unknown key"),
    ("train good.toml control.filters=[{name=\"zero_sdt\"}]", "there is no filter 'zero_sdt'; choose zero_std"),
    ("train good.toml control.filters=[{name=\"my.py:dropp\"}]", "my.py has no 'dropp'"),
    ("train good.toml critic.path=model", "[critic] is set, but algo.name=grpo needs no values: use ppo"),
    ("train good.toml reference.offload=true", "[reference] is set, but algo.name=grpo keeps none"),
    ("train good.toml algo.distill_coef=0.5", "distils from a teacher (distill_coef), but there is none"),
    ("train good.toml rollout.max_tokens=600 model.config={max_position_embeddings=512}", "sequences of 512 tokens at most (the model's"),
    ("train good.toml rollout.max_tokens=600 model.path=short", "rollout.max_tokens is 600, but the engine runs sequences of 512"),
    ("train good.toml batch.samples_per_prompt=1", "must be at least 2, not 1"),
    ("evaluate good.toml evaluate.sets.test.path=odd.jsonl", "the columns are question, answer"),
    ("train good.toml model.path=weights", "model.path: weights has no tokenizer.json or tokenizer_config.json"),
    ("train good.toml model.path=texts", "model.path: texts has no config.json"),
    ("generate good.toml model.path=weights", "model.path: weights has no tokenizer.json"),
    ("serve weights", "model.path: weights has no tokenizer.json"),
    ("plan texts", "model.path: texts has no config.json"),
    ("doctor nourl", "'nourl' is not the address of a server; write http://HOST:PORT"),
    ("serve modell", "there is no model folder 'modell'"),
    ("plan modell", "there is no model folder 'modell'"),
    ("init math", "math has config.toml already"),
    ("train good.toml num_generations=4", "in whet it is batch.samples_per_prompt"),
    ("train good.toml --lr-decay-style cosine", "in whet it is train.optim.schedule"),
    ("check good.toml --threads 3", "there is no option --threads"),
]


@pytest.mark.parametrize(("typed", "told"), TOLD)
def test_what_is_wrong_with_settings_is_told_without_them(ended, typed, told):
    status, _, err = ended[typed]
    assert (status, err[:7]) == (2, "error: "), err
    assert told in err and "broken" not in err


def test_a_process_tells_the_same(folder, ended):
    typed, _ = TOLD[0]
    done = light_python(folder, "-m", "whet", *typed.split())
    assert [done.returncode, done.stdout, done.stderr] == ended[typed]


HELP = [
    *((f"{command}--help", "Usage") for command in ("", "train ", "serve ", "check ")),
    *((f"{command} --keys", "model.path") for command in ("train", "sft", "dpo", "rm", "evaluate", "generate", "serve")),
    ("--version", "whet 0"),
]


@pytest.mark.parametrize(("typed", "told"), HELP)
def test_help_needs_none_of_them(ended, typed, told):
    status, out, err = ended[typed]
    assert status == 0, err
    assert told in out


CHECKED = [("check typo.toml", "num_rolouts: unknown key"), ("check missing.toml", "there is no configuration file")]


@pytest.mark.parametrize(("typed", "told"), CHECKED)
def test_a_check_tells_of_settings_without_them(ended, typed, told):
    status, out, err = ended[typed]
    assert (status, err) == (2, "") and told in out and out.rstrip().endswith("not checked")


CALLS = """
import whet

ROWS, KEPT = [{"prompt": "What is 2 + 3?", "label": "5"}], {"num_rollouts": 1, "run_dir": "runs/light"}


def bare(x: int): ...


def told(call):
    try:
        call()
    except ImportError as error:
        print("LOADED", error)
    except (ValueError, AttributeError) as error:
        print(str(error).splitlines()[0])


told(lambda: whet.train("modell", ROWS, lambda t: 1.0, **KEPT))
told(lambda: whet.train("model", [{"question": "q"}], lambda t: 1.0, **KEPT))
told(lambda: whet.train("model", ["a text", "another"], lambda t: 1.0, **KEPT))
told(lambda: whet.train("model", ROWS, lambda prompts, completions: [1.0], **KEPT))
told(lambda: whet.train("model", ROWS, "maths", **KEPT))
told(lambda: whet.train("model", ROWS, lambda t: 1.0, tools=[bare], **KEPT))
told(lambda: whet.train("model", ROWS, lambda t: 1.0, num_generations=8))
told(lambda: whet.evaluate("model", ROWS, "maths", run_dir="runs/light"))
told(lambda: whet.generate("modell", "What is 2 + 3?"))
told(lambda: whet.generate("weights", "What is 2 + 3?"))
told(lambda: whet.sft("model", ROWS, num_steps=1, run_dir="runs/light"))
told(lambda: whet.dpo("model", ROWS, num_steps=1, run_dir="runs/light"))
told(lambda: whet.Run("runs/nothing"))
"""
ANSWERS = (
    "there is no model folder 'modell'",
    "there is no column 'prompt'",
    "a list of texts",
    "cannot be called as f(trajectory)",
    "did you mean math",
    "has no docstring",
    "in whet it is batch.samples_per_prompt",
    "did you mean math",
    "there is no model folder 'modell'",
    "weights has no tokenizer.json",
    "there is no column 'messages' (messages_key); the columns are prompt, label; if prompts and replies have columns of their own",
    "there is no column 'chosen'",
    "is no run's folder",
)


def test_mistakes_in_python_are_answered_without_them(folder):
    done = light_python(folder, "-c", CALLS)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(ANSWERS) and all(words in line for line, words in zip(lines, ANSWERS, strict=True)), lines
    assert not (folder / "runs").exists(), "a call that did nothing leaves nothing"


NEEDS = ["serve model port=0", "train good.toml run_dir=run"]


@pytest.mark.parametrize("typed", NEEDS)
def test_what_good_settings_ask_for_needs_them(ended, typed):
    status, _, err = ended[typed]
    assert status == 1 and "is broken here" in err
