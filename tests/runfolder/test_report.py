import json
import os
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.store import MANIFEST, CheckpointStore
from whet.cli import app
from whet.config import dump_toml
from whet.env.rollout import failure_of
from whet.observe.trackers import JsonlTracker
from whet.runfolder.environment import environment
from whet.runfolder.journal import Journal
from whet.runfolder.lock import claim
from whet.runfolder.report import write_report
from whet.settings.rl import RunConfig
from whet.types import Failure, Progress

DATA = [f"Tom has {i} apples and what was it?" for i in range(20)]
"""Prompts, replies and rows, each planted somewhere else."""
SECRETS = [f"wholly unknown w0rds {i}" for i in range(9)]
"""Known to be secret by the keys or variables that they stand under alone."""
SHAPED = ["sk-abcdefgh12345678", "hf_AbCdEfGhIjKlMnOpQrStUvWx", "ghp_abcdefghijklmnop1234", "AKIAIOSFODNN7EXAMPLE", "glpat-abcdefgh-1234"]
LOGGED_PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\n-----END RSA PRIVATE KEY-----"
PEM = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\n-----END PRIVATE KEY-----"
HOME, LOGIN = "somebody-31", "somebody-32"


def settings(run_dir: Path, **more) -> dict:
    options = {
        "api_key": SECRETS[0],
        "url": "https://bob:pa55w0rd@judge.example.org/v1",
        "headers": {"Authorization": f"Bearer {SECRETS[1]}", "x-note": f"try {SHAPED[0]}"},
        "credentials": ["abc-1", {"pem": PEM}],
        "max_tokens": 77,
        "stop_token_ids": [1, 2],
    }
    return {
        "run_dir": str(run_dir),
        "num_rollouts": 3,
        "model": {"path": f"{Path.home()}/models/tiny"},
        "data": {"train": f"/scratch/{LOGIN}/train.jsonl", "prompt_key": "conundrum", "label_key": "answer"},
        "batch": {"prompts_per_rollout": 2, "samples_per_prompt": 2},
        "reward": {"name": "judge:score", "options": options},
        **more,
    }


@pytest.fixture
def person(tmp_path, monkeypatch):
    """Somebody with a home folder and secrets in the environment, in a folder of theirs."""
    (tmp_path / HOME / "runs").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / HOME))
    monkeypatch.setenv("LOGNAME", LOGIN)
    monkeypatch.setenv("JUDGE_API_KEY", SECRETS[2])
    monkeypatch.chdir(tmp_path / HOME)


@pytest.fixture
def theirs(tmp_path):
    """A user's environment whose errors quote what the model wrote, and whose source holds a secret."""
    path = tmp_path / HOME / "judge.py"
    source = f'api_key = "{SECRETS[3]}"; token = reply[0]; raise ValueError(f"bad reply: {{reply}} {SHAPED[1]}")'
    path.write_text(f"def step(reply):\n    {source}\n")
    space: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    return space["step"]


def save(folder: Path) -> None:
    (folder / "weights.safetensors").write_text(DATA[10])
    (folder / "state.json").write_text(json.dumps({"rollout": DATA[11]}))
    (folder / "config.toml").write_text(f'run_dir = "x"\napi_key = "{SECRETS[0]}"\n')


@pytest.fixture
def run(person, theirs):
    """A run that failed, with data and secrets in every file that can hold words."""
    folder = Path("runs/judge").absolute()
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text(dump_toml(RunConfig.model_validate(settings(folder))))
    old = settings(folder, seed=5)
    old["reward"]["options"]["api_key"] = SECRETS[4]
    (folder / "config.1.toml").write_text(dump_toml(RunConfig.model_validate(old)))
    journal = Journal(folder)
    named = f"'reward.options.api_key={SECRETS[0]}' 'env.options.password={SECRETS[8]}'"
    command = f"whet train a.toml {named} --token '{SECRETS[5]}' x={SHAPED[2]}"
    journal.started(command, environment())
    journal.line(f"settings changed: reward.options.api_key = {SECRETS[0]!r} (was {SECRETS[4]!r}), seed = 0 (was 5)")
    journal.line(f"a row {DATA[0]!r} and {DATA[1]!r}, {SECRETS[2]} of {Path.home()}/x and /scratch/{LOGIN}/y", "warning")
    journal.line(f"key:\n{LOGGED_PEM}\nAuthorization: Basic {SECRETS[6]}", "error")
    journal.line(f"tried {SECRETS[8]}")
    journal.line("step 1/3  reward 0.412")
    try:
        theirs(DATA[2])
    except ValueError as error:
        journal.failure("train/3#0/1", failure_of(error, "env.step"))
    journal.failure("train/4#0/1", Failure("RewardError", DATA[3], "reward", f"Traceback\n{DATA[4]}\nRewardError: {DATA[3]}"))
    cause = "".join((f"ValueError: {DATA[5]}\n", f"Traceback (most recent call last):\n{DATA[6]}"))
    journal.ended("failed", RuntimeError(f"rollout 1: all 4 trajectories failed\n4 in env.step: {cause}"), command)
    journal.close()
    metrics = JsonlTracker(folder / "metrics.jsonl")
    for step in range(1, 301):
        metrics.log(step, {"reward/total": step / 300, "policy/kl_token": float("nan")})
    metrics.close()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 301, "note": DATA[7], "rows": [DATA[8]], "reward/total": 1.5}) + "\n" + '{"step": 302, "torn')
    store = CheckpointStore(folder / "checkpoints", CheckpointConfig())
    facts = {"config_hash": "0123abcd", "environment": environment(), "api_key": SECRETS[7]}
    saved = store.save(Progress(2, 2, 2), {"eval/test/reward/total": 0.5}, facts, save)
    manifest = json.loads((saved / MANIFEST).read_text())
    (saved / MANIFEST).write_text(json.dumps({**manifest, "state": {"row": DATA[9]}}))
    (folder / "stacks.txt").write_text(f'Thread 1\n  File "{Path.home()}/judge.py", line 2 in step\n')
    kept = folder / "nonfinite/batch_1"
    kept.mkdir(parents=True)
    for name in ("config.toml", "reason.json", "batch.safetensors"):
        (kept / name).write_text(f'run_dir = "{DATA[12]}"\n')
    for name in ("rollouts/rollout_000000.parquet", "model.bin", "data.jsonl", ".owner.json", "results.json", "wandb.log"):
        (folder / name).write_text(f"{DATA[12]} {SECRETS[0]} {SHAPED[3]}")
    return folder


def members(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name).decode() for name in archive.namelist()}


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_no_member_holds_data_or_a_secret(run):
    found = members(write_report(run))
    planted = [*DATA, *SECRETS, *SHAPED, "MIIEvQ", "MIIEow", "pa55w0rd", "abc-1", HOME, LOGIN, "train/3#0"]
    everything = "".join(path.read_text() for path in run.rglob("*") if path.is_file())
    used = [word for word in planted if word in everything + str(Path.home()) or word in DATA[13:] or word == SHAPED[4]]
    assert used == planted, "what is not planted proves nothing"
    for name, text in found.items():
        for word in planted:
            for spelled in (word, json.dumps(word)[1:-1], word.split(" apples")[0] if word in DATA else word):
                assert spelled not in text and spelled not in name, f"{name}: {word}"
        for word in SECRETS:
            assert word.removeprefix("wholly ") not in text, f"{name}: a part of {word}"
            assert f"w0rds {word[-1]}" not in text, f"{name}: a part of {word}"


def test_what_a_maintainer_needs_is_there(run):
    path = write_report(run)
    assert path == Path("judge-report.zip")
    found = members(path)
    assert set(found) == {
        *("config.toml", "config.1.toml", "starts.jsonl", "log.txt", "metrics.jsonl", "failures.jsonl", "end.json"),
        *("checkpoints/rollout_000002/manifest.json", "stacks.txt", "files.txt", "environment.json", "README.txt"),
    }
    config = tomllib.loads(found["config.toml"])
    original = tomllib.loads((run / "config.toml").read_text())
    gone = f"<text of {len(original['run_dir'])} characters>"
    assert config["run_dir"] == gone and config["model"]["path"] == f"<text of {len(original['model']['path'])} characters>"
    lost = {key: f"<text of {len(original['data'][key])} characters>" for key in ("train", "prompt_key")}
    assert config["data"] == {**original["data"], **lost} and config["data"]["label_key"] == "answer", "a word that whet has"
    assert config["reward"]["name"] == "<text of 11 characters>" and config["reward"]["options"] == {
        "<key of 7 characters>": "<text of 22 characters>",
        "url": "<text of 41 characters>",
        "<key of 7 characters> (2)": "<table of 2>",
        "<key of 11 characters>": "<list of 2>",
        "max_tokens": "<number>",
        "stop_token_ids": "<list of 2>",
    }
    for part in ("batch", "rollout", "algo", "train", "engine", "evaluate", "checkpoint", "observe", "seed", "deterministic"):
        assert config[part] == original[part]
    assert tomllib.loads(found["config.1.toml"])["seed"] == 5
    [start] = rows(found["starts.jsonl"])
    assert start["environment"] == environment() and start["pid"] == os.getpid()
    lengths = [len(each) for each in ("a.toml", f"reward.options.api_key={SECRETS[0]}", f"env.options.password={SECRETS[8]}")]
    first, second, third = (f"<text of {length} characters>" for length in lengths)
    rest = f"--token <text of {len(SECRETS[5])} characters> <text of {len(SHAPED[2]) + 2} characters>"
    assert start["command"] == f"whet train {first} {second} {third} {rest}"
    assert json.loads(found["environment.json"]) == environment()
    last = rows(found["metrics.jsonl"])
    assert len(last) == 199 and last[-1] == {"step": 301, "reward/total": 1.5}
    assert last[-2].items() >= {"step": 300, "reward/total": 1.0, "policy/kl_token": None, "nonfinite": ["policy/kl_token"]}.items()
    manifest = json.loads(found["checkpoints/rollout_000002/manifest.json"])
    original = json.loads((run / "checkpoints/rollout_000002/manifest.json").read_text())
    assert manifest == {
        "format": original["format"],
        "progress": {"rollout_id": 2, "optimizer_step": 2, "version": 2},
        "metrics": {"eval/test/reward/total": 0.5},
        "facts": {"environment": environment()},
        "sizes_bytes": {name: part["size_bytes"] for name, part in original["parts"].items()},
    }
    assert "0123abcd" not in str(found), "a digest of the settings could be used to guess a secret in them"
    assert not any(part["digest"] in str(found) for part in original["parts"].values())
    assert found["stacks.txt"] == "  outside whet: 1\n"


def test_failures_keep_place_type_and_frames(run):
    found = members(write_report(run))
    first, second = rows(found["failures.jsonl"])
    size = len(f"bad reply: {DATA[2]} {SHAPED[1]}")
    assert (first["kind"], first["where"], first["message"]) == ("ValueError", "env.step", f"<text of {size} characters>")
    assert first["frames"] == ["  outside whet: 2", "ValueError"]
    assert first.keys() == second.keys() == {"time", "kind", "where", "message", "frames"}
    assert (second["kind"], second["where"], second["frames"]) == ("RewardError", "reward", [])
    end = json.loads(found["end.json"])
    assert (end["status"], end["kind"]) == ("failed", "RuntimeError")
    assert end["message"].startswith("rollout <number>: all <number> trajectories failed\n<text of ")
    assert end["resume_command"] == rows(found["starts.jsonl"])[0]["command"]


def test_the_log_keeps_its_lines(run):
    log = members(write_report(run))["log.txt"].splitlines()
    said = [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+?-?\d\d:\d\d ", "", line) for line in log]
    assert re.fullmatch(r"start 1, process \d+: whet train (<text of \d+ characters> ?|--token )+", said[0].removeprefix("info    "))
    assert all(re.fullmatch(r"(warning|error  |info   |   ) <text of \d+ characters>", line) for line in said[1:9]), said
    assert said[9:] == [
        "info    step 1/3  reward 0.412",
        "warning first ValueError in env.step: see failures.jsonl",
        "warning first RewardError in reward: see failures.jsonl",
        "error   failed with RuntimeError: see end.json",
    ]


def test_the_readme_says_what_is_there_and_what_is_not(run):
    text = members(write_report(run))["README.txt"]
    assert "The run: nobody works in it." in text and "Not there" not in text
    for name in ("config.toml", "starts.jsonl", "log.txt", "metrics.jsonl", "failures.jsonl", "end.json", "files.txt", "environment.json"):
        assert re.search(rf"^  {re.escape(name)}", text, re.MULTILINE), name
    assert "Everything else is replaced by its type and length" in text
    listing = members(Path("judge-report.zip"))["files.txt"]
    assert re.search(r"^ +\d+  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d  rollouts/rollout_000000\.parquet$", listing, re.MULTILINE)
    sizes = {line.split()[-1]: int(line.split()[0]) for line in listing.splitlines()}
    assert sizes == {path.relative_to(run).as_posix(): path.stat().st_size for path in run.rglob("*") if path.is_file()}


def test_only_the_last_lines_are_packed(person):
    folder = Path("runs/long").absolute()
    folder.mkdir()
    lines = [f"2026-11-20 10:00:00+00:00 info    line {i}" for i in range(7000)]
    key = ["-----BEGIN PRIVATE KEY-----", *["    MIIEvQIBADANBgkq"] * 8, "    -----END PRIVATE KEY-----"]
    lines[1995:2005] = ["2026-11-20 10:00:00+00:00 info    the key:", *key]
    (folder / "log.txt").write_text("\n".join(lines) + "\n")
    (folder / "starts.jsonl").touch()
    log = members(write_report(folder))["log.txt"].splitlines()
    assert len(log) == 5000 and log[-1].endswith("info    <text of 9 characters>") and "MIIEvQ" not in "".join(log)


def test_a_folder_of_several_runs(person):
    """As a quickstart leaves it: warmup, rl and evaluations in folders of their own, and files that are no run's."""
    top = Path("runs/quickstart-seed0")
    for name in ("warmup", "rl", "evaluation_before/evaluate_1"):
        (top / name).mkdir(parents=True)
        (top / name / "config.toml").write_text(f'run_dir = "{name}"\n')
        (top / name / "starts.jsonl").touch()
    (top / "rl/metrics.jsonl").write_text('{"step": 1, "time": 2.0}\n')
    claim(top, "whet quickstart").release()
    for name in ("data", "base", "other"):
        (top / name).mkdir()
        (top / name / "train.jsonl").write_text(DATA[0])
    (top / "other/config.toml").write_text('name = "of something else"\n')
    (top / "quickstart.toml").write_text("seed = 0\n")
    found = members(write_report(top))
    assert set(found) == {
        *("warmup/config.toml", "rl/config.toml", "evaluation_before/evaluate_1/config.toml", "rl/metrics.jsonl"),
        *("warmup/starts.jsonl", "rl/starts.jsonl", "evaluation_before/evaluate_1/starts.jsonl"),
        *("README.txt", "files.txt", "environment.json"),
    }
    assert "data/train.jsonl" in found["files.txt"] and DATA[0] not in "".join(found.values())
    for name in ("warmup", "rl", "evaluation_before/evaluate_1"):
        assert f"{name}: nobody works in it.\n  Not there: " in found["README.txt"]


def test_a_run_that_is_running_is_packed_without_its_lock(run):
    held = claim(run, f"whet train a.toml reward.options.api_key={SECRETS[0]}")
    try:
        found = members(write_report(run))
    finally:
        held.release()
    assert "The run: it is running." in found["README.txt"]
    assert ".owner.json" not in found and SECRETS[0] not in "".join(found.values())


def test_a_half_written_run_is_packed_as_far_as_it_goes(person):
    folder = Path("runs/half").absolute()
    (folder / "checkpoints/rollout_000001").mkdir(parents=True)
    (folder / "config.toml").write_text('run_dir = "runs/half"\n[reward.options]\napi_key = "half a secr')
    (folder / "starts.jsonl").write_text('{"time": 1.0, "command": "whet train"}\n[1]\n{"ti')
    (folder / "failures.jsonl").write_text('{"kind": "ValueError"}\n')
    (folder / "end.json").write_text('{"status": "fai')
    (folder / "checkpoints/rollout_000001/manifest.json").write_text("")
    found = members(write_report(folder))
    assert set(found) == {"starts.jsonl", "failures.jsonl", "files.txt", "environment.json", "README.txt"}
    assert rows(found["starts.jsonl"]) == [{"time": 1.0, "command": "whet train"}]
    assert rows(found["failures.jsonl"]) == [{"kind": "ValueError", "message": "<text of 4 characters>", "frames": []}]
    for words in (
        "Not there: log.txt, metrics.jsonl.",
        "Left out: config.toml, which is no whole TOML file.",
        "Left out: end.json, which is no whole JSON file.",
        "Left out: checkpoints/rollout_000001/manifest.json, which is no whole JSON file.",
    ):
        assert words in found["README.txt"]
    assert "half a secr" not in "".join(found.values())


def test_a_run_that_only_began_is_one(person):
    Path("runs/begun").mkdir()
    claim(Path("runs/begun"), "whet train a.toml").release()
    found = members(write_report(Path("runs/begun")))
    assert "Not there: config.toml, starts.jsonl, log.txt, metrics.jsonl, failures.jsonl, end.json." in found["README.txt"]


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
ODD = st.dictionaries(
    st.sampled_from(
        [
            *("time", "pid", "command", "environment", "kind", "where", "message", "frames", "traceback", "status", "resume_command"),
            *("step", "nonfinite", "reward/total", "format", "facts", "parts", "state", "progress", "user_code"),
        ]
    ),
    ANY,
) | st.text(max_size=12)


@hypothesis_settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ODD, min_size=6, max_size=6))
def test_whatever_the_files_hold_there_is_a_report(tmp_path, contents):
    folder = tmp_path / "odd"
    (folder / "checkpoints/x").mkdir(parents=True, exist_ok=True)
    names = ("starts.jsonl", "failures.jsonl", "metrics.jsonl", "end.json", "checkpoints/x/manifest.json", "log.txt")
    for name, content in zip(names, contents, strict=True):
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, errors="backslashreplace")
    target = tmp_path / "odd.zip"
    target.unlink(missing_ok=True)
    for name, text in members(write_report(folder, target)).items():
        assert name.endswith((".txt", ".jsonl")) or json.loads(text) is not None
        assert not name.endswith(".jsonl") or rows(text) is not None


@pytest.mark.parametrize("what", ["missing", "empty", "file"])
def test_what_is_no_run_is_refused(person, what):
    path = Path("runs/what")
    if what == "empty":
        path.mkdir()
        (path / "config.toml").write_text('name = "of something else"\n')
    if what == "file":
        path.touch()
    with pytest.raises(ValueError, match=r"runs/what.*(no folder|not the folder of a run)?.*whet report takes the folder of a run"):
        write_report(path)
    assert not list(Path.cwd().glob("*.zip"))


def test_a_file_that_is_there_stays(run):
    Path("mine.zip").write_text("mine")
    with pytest.raises(ValueError, match=r"mine\.zip exists already; remove it, or choose another file with --output"):
        write_report(run, Path("mine.zip"))
    assert Path("mine.zip").read_text() == "mine"


def test_an_output_that_cannot_be_written_is_told(run):
    with pytest.raises(ValueError, match=r"no/such/folder/x\.zip cannot be written: No such file or directory; choose another file"):
        write_report(run, Path("no/such/folder/x.zip"))


def test_a_report_that_does_not_fit_leaves_no_half_of_it(run, monkeypatch):
    def full(self, name, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(ValueError, match=r"x\.zip cannot be written: No space left on device"):
        write_report(run, Path("x.zip"))
    assert not Path("x.zip").exists()


def test_the_command(run):
    done = CliRunner().invoke(app, ["report", str(run), "--output", "a.zip"])
    assert done.exit_code == 0 and "a.zip: look through it" in done.stdout
    assert DATA[2] not in members(Path("a.zip"))["failures.jsonl"]
    again = CliRunner().invoke(app, ["report", str(run), "--output", "a.zip"])
    assert again.exit_code == 2 and "error: a.zip exists already" in again.stderr


def test_the_name_of_the_file_is_that_of_the_folder(run, monkeypatch):
    monkeypatch.chdir(run)
    done = subprocess.run(
        [sys.executable, "-m", "whet", "report", "."],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path("judge-report.zip").is_file()


KEY_FILE = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n"


@pytest.fixture
def outside(tmp_path):
    """A folder beside the run, with what must not get into a report."""
    folder = tmp_path / "outside"
    (folder / "rollout_000009").mkdir(parents=True)
    (folder / "config.toml").write_text('run_dir = "x"\nseed = 42424242424242\n')
    for name in ("starts.jsonl", "failures.jsonl", "metrics.jsonl", "end.json", "rollout_000009/manifest.json", "a.json"):
        (folder / name).write_text(json.dumps({**dict.fromkeys(("time", "step", "format"), 42424242424242), "status": "failed"}))
    for name in ("log.txt", "stacks.txt"):
        (folder / name).write_text("step 42424242424242/42424242424242\n" + KEY_FILE)
    return folder


LINKED = ["config.toml", "config.7.toml", "starts.jsonl", "log.txt", "metrics.jsonl", "failures.jsonl", "end.json", "stacks.txt"]


@pytest.mark.parametrize("name", LINKED)
@pytest.mark.parametrize("how", ["absolute", "relative", "pipe", "folder"])
def test_no_link_is_followed_and_no_pipe_is_waited_for(run, outside, name, how):
    (run / name).unlink(missing_ok=True)
    target = outside / name.replace(".7", "")
    if how == "pipe":
        os.mkfifo(run / name)
    elif how == "folder":
        (run / name).mkdir()
    else:
        (run / name).symlink_to(target if how == "absolute" else os.path.relpath(target, run))
    found = members(write_report(run))
    assert name not in found and "42424242424242" not in "".join(found.values())
    assert f"  Left out: {name}, which is a link, or no ordinary file." in found["README.txt"]


def test_no_linked_folder_is_looked_into(run, outside, tmp_path):
    checkpoints = run / "checkpoints"
    (checkpoints / "rollout_000009").symlink_to(outside / "rollout_000009")
    (checkpoints / "rollout_000002/manifest.json").unlink()
    (checkpoints / "rollout_000002/manifest.json").symlink_to(outside / "rollout_000009/manifest.json")
    (run / "inner").symlink_to(outside)
    (run / "more").mkdir()
    (run / "more/inner").symlink_to(outside)
    found = members(write_report(run))
    assert "42424242424242" not in "".join(found.values()) and not any("inner" in name or "checkpoints" in name for name in found)
    assert "Left out: checkpoints/rollout_000002/manifest.json, which is a link" in found["README.txt"]
    os.rename(checkpoints, tmp_path / "elsewhere")
    checkpoints.symlink_to(tmp_path / "elsewhere")
    found = members(write_report(run, Path("b.zip")))
    assert not any("checkpoints" in name for name in found) and "Left out: checkpoints, which is a link" in found["README.txt"]


def test_a_file_that_becomes_a_link_while_it_is_looked_at_is_not_read(run, outside, monkeypatch):
    """Swapped between the look and the opening."""
    whole = os.stat

    def swapping(path, *args, **kwargs):
        found = whole(path, *args, **kwargs)
        if path == "log.txt" and kwargs.get("dir_fd") is not None:
            (run / path).unlink()
            (run / path).symlink_to(outside / path)
        return found

    monkeypatch.setattr(os, "stat", swapping)
    found = members(write_report(run))
    assert (run / "log.txt").is_symlink() and "log.txt" not in found and "42424242424242" not in "".join(found.values())


def test_a_linked_lock_is_neither_emptied_nor_waited_for(run, outside):
    for name in (".lock", ".owner.json"):
        (run / name).unlink(missing_ok=True)
    (run / ".lock").symlink_to(outside / "log.txt")
    os.mkfifo(run / ".owner.json")
    assert "whether it is running cannot be told" in members(write_report(run))["README.txt"]
    assert "42424242424242" in (outside / "log.txt").read_text()
    (run / ".lock").unlink()
    os.mkfifo(run / ".lock")
    write_report(run, Path("b.zip"))


UNKNOWN = ["correct horse battery", "73912", "S3same-0pen", "hunter2", "tr0ub4dor&3", "\u5bc6\u7801\u4e00\u4e8c", "deadbeef" * 8]
"""Secrets that look like nothing, under keys that name nothing."""


@pytest.mark.parametrize("secret", UNKNOWN)
def test_what_nobody_knows_to_be_secret_stays_here(person, secret):
    folder = Path("runs/x").absolute()
    folder.mkdir()
    tree = settings(folder, seed=31)
    number = int(secret) if secret.isdigit() else secret
    tree["reward"] = {"name": "math", "options": {"pin": number, "nested": {"deep": [secret]}, secret.replace(" ", "_"): 1}}
    tree["data"]["system_prompt"] = f"you know {secret}"
    tree["observe"] = {"on_rollout": secret}
    tree |= {"house": {"key": number}, "surprise": number}
    (folder / "config.toml").write_text(dump_toml(tree))
    journal = Journal(folder)
    keys = ("house.key", "data.system_prompt", "reward.options.pin", "observe.on_rollout.name", secret)
    given = [f"{key}='{secret}'" for key in keys] + [f"'reward.options={{pin=\"{secret}\"}}'", f"'{secret}'"]
    journal.started(f"whet train {' '.join(given)}", environment())
    quoted = f"reward.options.pin: expected text, got {secret!r}"
    for text in (secret, quoted, f"settings changed: reward.options.pin = {number}", f"a\n  {secret}  {secret}", f"step {secret}"):
        journal.line(text, "warning")
    journal.failure("t", Failure(secret, secret, f"tool {secret}", f"Traceback\n  File \"/x/{secret}.py\", line 1, in f\n{secret}"))
    journal.ended("failed", RuntimeError(f"rollout 3: all 4 trajectories failed\n4 in env.step: {secret}"), f"whet train {secret}")
    journal.close()
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, f"reward/{secret}": 1.0, "note": secret, "nonfinite": [secret]}) + "\n")
    (folder / "checkpoints/rollout_000001").mkdir(parents=True)
    facts = {"environment": {"cpu": {"model": secret}, secret: 1}, "pin": number}
    manifest = {"format": 3, "metrics": {secret: 1}, "facts": facts, "digest": secret}
    (folder / "checkpoints/rollout_000001/manifest.json").write_text(json.dumps(manifest))
    (folder / f"{secret}.txt").touch()
    found = members(write_report(folder))
    for name, text in found.items():
        for spelled in {secret, json.dumps(secret)[1:-1], secret.replace(" ", "_")}:
            assert spelled not in text and spelled not in name, f"{name}: {text}"
    assert tomllib.loads(found["config.toml"])["seed"] == 31


def test_a_report_of_huge_files_is_small_and_quick(person):
    folder = Path("runs/x").absolute()
    folder.mkdir()
    for name in ("log.txt", "metrics.jsonl", "starts.jsonl", "stacks.txt", "config.toml", "end.json"):
        with open(folder / name, "wb") as file:
            file.truncate(1 << 38)
    (folder / "failures.jsonl").write_text("[" * 1_000_000)
    begin = time.monotonic()
    assert len("".join(members(write_report(folder)).values())) < 1 << 20 and time.monotonic() - begin < 60
