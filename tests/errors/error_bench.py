"""A bench for provoking errors: a folder as a user has it, commands run in it, and what was printed.

Every case gets a folder of its own, which is also the current directory, so that messages read as a user sees them:

    run.toml      a small run of `train.jsonl` with `model`
    tools.toml    the same with an environment of tools, and one token to a turn
    train.jsonl   four questions
    my_code.py    rewards, tools and a parser
    model         a small model, shared by all cases and only read
    runs/demo     made by `bench.earlier()`: a run that was trained to its end before the mistake is made
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from whet.cli import main
from whet.observe.records import read_records
from whet.quickstart.model import SmallModelConfig, make_model
from whet.runfolder.journal import END, FAILURES, LOG, STARTS

HERE = Path(__file__).parent
ROWS = (
    {"prompt": "What is 2+3?", "label": "5", "metadata": {"difficulty": 1}},
    {"prompt": "What is 4+4?", "label": "8"},
    {"prompt": "What is 7-2?", "label": "5"},
    {"prompt": "What is 3*3?", "label": "9"},
)
RUN_TOML = """\
run_dir = "runs/demo"
num_rollouts = 1

[model]
path = "model"

[data]
train = "train.jsonl"
shuffle = false

[batch]
prompts_per_rollout = 2
samples_per_prompt = 4

[rollout]
max_tokens = 256
max_turn_tokens = {max_turn_tokens}
{more}
[reward]
name = "exact"

[observe]
display = "plain"
"""
FAILED = re.compile(r"^\w+ +FAIL .*(?:\n .*)*", re.MULTILINE)
"""What failed in a report of `whet check`, with the lines below it."""
NUM_TRAJECTORIES = 8
TRAINS = ("train", "sft")
"""Commands whose configurations `whet check` can look at."""
JOURNAL = (LOG, STARTS, FAILURES)
"""What a start adds to; `END` is always the last start's."""
VARIES = (
    (re.compile(r"^warning: .*threads take .* times as long as one.*\n", re.MULTILINE), ""),  # where other work runs
    (re.compile(r"\x1b\[[0-9;]*m"), ""),  # colours
    (re.compile(r"0x[0-9a-f]{6,}"), "0x..."),  # objects
    (re.compile(r"(cut at byte) \d+"), r"\1 1107"),  # lines of metrics.jsonl hold times
    (re.compile(r"state.json has \d+ bytes, not \d+"), "state.json has 1326 bytes, not 25152"),
    (re.compile(r"\(\d+ MiB free\)"), "(0 MiB free)"),
    (re.compile(r"process \d+ on \S+ since [-\d]+ [:\d]+"), "process 4242 on laptop since 2026-01-31 12:00:00"),
    (re.compile(r"was at [-\d]+ [:\d]+, and now it is [-\d]+ [:\d]+"), "was at 2100-01-01 00:00:00, and now it is 2026-01-31 12:00:00"),
)
"""What differs from run to run, and what is shown for it. Folders are shortened to `...`."""


@dataclass(frozen=True)
class Told:
    """What a user was told, and how to see that nothing was lost."""

    status: int
    message: str
    check: Callable[[], None]


@dataclass(frozen=True)
class Case:
    """One thing that can go wrong, as docs/errors.md shows it."""

    id: str
    title: str
    cause: str
    remedy: str
    words: tuple[str, ...]
    """What the message has to say, whatever else it says."""
    provoke: Callable[[Bench], Told]
    status: int = 2
    """0: the run goes on."""
    seen_by_check: bool = False
    """Whether the fault is there before training, where `whet check` has to find it."""
    check_words: tuple[str, ...] = ()
    """What `whet check` has to say, where that is not `words`."""
    mend: Callable[[Bench], tuple[str, ...]] | None = None
    """Does what `remedy` says, where the run can then be started again; returns what to type behind the configuration."""
    goes_wrong_at_once: bool = True
    """Whether it can go wrong before the run has learned anything."""


@dataclass(frozen=True)
class Shared:
    """What is made once for all cases."""

    model: Path
    other_model: Path
    """The same tokenizer, another shape."""
    earlier: Path
    """The folder of a run that was trained to its end."""
    vocab_size: int


def make_shared(folder: Path) -> Shared:
    """The models, and a run trained with one of them."""
    shape = SmallModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24)
    texts = [row["prompt"] for row in ROWS] * 2
    make_model(folder / "model", texts, shape, 0)
    make_model(folder / "other", texts, shape.model_copy(update={"hidden_size": 32}), 0)
    vocab_size = json.loads((folder / "model/config.json").read_text())["vocab_size"]
    shared = Shared(folder / "model", folder / "other", folder / "home/runs/demo", vocab_size)
    with Bench.open(shared, folder / "home") as bench:
        status, _, err = bench.start("train", "run.toml")
    assert status == 0, err
    return shared


@dataclass
class Bench:
    """One case's folder."""

    folder: Path
    shared: Shared
    files: dict[str, bytes] = field(default_factory=dict)
    """The earlier run's, as they were before the last start."""
    checks: bool = False
    """`whet check` looks at each configuration that a case would train with."""
    fresh: bool = False
    """There is no earlier run: what goes wrong does so before anything was learned."""
    config: str = "run.toml"
    """Of the last start."""

    @classmethod
    @contextlib.contextmanager
    def open(cls, shared: Shared, folder: Path, *, checks: bool = False, fresh: bool = False) -> Iterator[Bench]:
        """Set the folder up and make it the current directory."""
        folder.mkdir(parents=True)
        (folder / "model").symlink_to(shared.model)
        (folder / "run.toml").write_text(RUN_TOML.format(max_turn_tokens=4, more=""))
        # Every token ends a turn, so every turn is answered by the environment.
        stops = f'max_turns = 2\nstop_token_ids = {list(range(shared.vocab_size))}\n\n[env]\nname = "tools"\n'
        (folder / "tools.toml").write_text(RUN_TOML.format(max_turn_tokens=1, more=stops))
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        shutil.copy(HERE / "error_my_code.py", folder / "my_code.py")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "path", list(sys.path))
            patch.setenv("PYTHONPATH", str(HERE.parents[1]))  # for reward workers: they are to run this whet, too
            patch.delenv("WHET_TRACEBACK", raising=False)
            yield cls(folder, shared, checks=checks, fresh=fresh)

    def file(self, name: str, content: str | bytes) -> str:
        """Write a file; returns its name."""
        (self.folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return name

    def model(self, name: str) -> Path:
        """A copy of the model, to be broken."""
        return Path(shutil.copytree(self.shared.model, self.folder / name)).relative_to(self.folder)

    def earlier(self) -> Path:
        """The earlier run, in `runs/demo`."""
        run = self.folder / "runs/demo"
        if not run.exists() and not self.fresh:
            shutil.copytree(self.shared.earlier, run)
        return run.relative_to(self.folder)

    def start(self, *arguments: object) -> tuple[int, str, str]:
        """Run `whet` with these arguments in this process: exit status, standard output, standard error."""
        out, err = io.StringIO(), io.StringIO()
        for name, module in list(sys.modules.items()):  # a start is a process: what was mended is read anew
            if str(getattr(module, "__file__", None) or "").startswith(f"{self.folder}/"):
                del sys.modules[name]
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as end,
        ):
            patch.setattr(sys, "argv", ["whet", *map(str, arguments)])
            main()
        assert isinstance(end.value.code, int)
        return end.value.code, self.plain(out.getvalue()), self.plain(err.getvalue())

    def refused(self, *arguments: object, command: str = "train", config: str = "run.toml") -> Told:
        """Start a command in the folder of the earlier run, of which nothing may be lost. The message is all that is said, but for the
        notes that settings or the environment changed."""
        self.config = config
        self.files = snapshot(self.earlier())
        if self.checks and command in TRAINS:
            return self.looked_at(config, *arguments)
        status, _, err = self.start(command, config, *arguments)
        message = re.sub(r"^warning: (settings|the environment) changed since the last start.*\n", "", err, flags=re.MULTILINE)
        return Told(status, message, lambda: check_kept(self.earlier(), self.files))

    def goes_on(
        self, *arguments: object, config: str = "run.toml", failed: Mapping[str, int], run: str = "runs/demo"
    ) -> Told:
        """Start a run that is to be trained to its end, though trajectories fail: `failed` by outcome. The message is all of its
        standard error."""
        self.config = config
        if self.checks:
            return self.looked_at(config, *arguments)
        status, _, err = self.start("train", config, *arguments)
        return Told(status, err, lambda: check_trained(self.folder / run, failed))

    def looked_at(self, config: str, *arguments: object) -> Told:
        """Have `whet check` look at a configuration, which leaves everything as it was. The message is what failed in its report."""
        before = snapshot(self.folder / "runs")
        status, out, err = self.start("check", config, *arguments)
        after = snapshot(self.folder / "runs")
        assert err == "\n", err
        assert after == before, "to look changes nothing"
        return Told(status, "\n".join(FAILED.findall(out)), lambda: None)

    def mended(self, *arguments: str) -> None:
        """Start the run again after the mistake was mended, and see it train: every rollout that is left, and nothing of it failed."""
        done = len(self.updates())
        status, _, err = self.start("train", self.config, *arguments)
        assert status == 0, err
        rows = self.updates()
        assert len(rows) >= max(done, 1) and rows[-1]["outcome/failed"] == 0, err
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "none is missing or doubled"
        assert (self.folder / "runs/demo/model/model.safetensors").is_file()

    def updates(self) -> list[dict]:
        """The lines of updates in `metrics.jsonl`."""
        path = self.folder / "runs/demo/metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row for row in rows if "policy/loss" in row]

    def rewrite(self, name: str, before: str, after: str) -> None:
        """Correct a file."""
        text = (self.folder / name).read_text()
        assert before in text
        (self.folder / name).write_text(text.replace(before, after))

    def plain(self, text: str) -> str:
        """What was printed without what differs from machine to machine."""
        text = text.replace(f"{self.folder}/", ".../").replace(str(self.folder), "...")
        for varying, shown in VARIES:
            text = varying.sub(shown, text)
        return text.rstrip() + "\n"


def together(*tolds: Told) -> Told:
    """Several starts as one: their messages one below the other."""
    (status,) = {told.status for told in tolds}

    def check() -> None:
        for told in tolds:
            told.check()

    return Told(status, "".join(told.message for told in tolds), check)


def with_message(told: Told, message: str) -> Told:
    """The same with another message, where standard error is not what the user reads."""
    return replace(told, message=message)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path in there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def check_kept(run: Path, before: Mapping[str, bytes]) -> None:
    """See that a run's files are what they were. Its settings may have been set aside, as config.<n>.toml; its journal may have grown."""
    after = snapshot(run)
    aside = [content for name, content in after.items() if re.fullmatch(r"config\.\d+\.toml", name)]
    assert len(before) > 5 and "metrics.jsonl" in before, "there is something to lose"
    for name, content in before.items():
        found = after.get(name, b"")
        kept = found == content or (name == "config.toml" and content in aside) or (name in JOURNAL and found.startswith(content))
        assert kept or name == END, f"{name} is not what it was"


def check_trained(run: Path, failed: Mapping[str, int]) -> None:
    """See that a rollout was trained on without what failed, and that what failed is counted and kept."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (row,) = (row for row in rows if "policy/loss" in row)
    rates = {name: number / NUM_TRAJECTORIES for name, number in failed.items()}
    assert row["outcome/failed"] == sum(rates.values())
    assert {name: row[f"outcome/{name}"] for name in rates} == rates
    records: Sequence[dict] = read_records(run / "rollouts")
    assert len({record["trajectory"] for record in records}) == NUM_TRAJECTORIES
    for record in records:
        assert record["valid"] == (record["error"] is None) == (record["reward"] is not None)
        assert record["valid"] == (record["outcome"] not in failed)
        assert len(record["tokens"]) == len(record["logprobs"])
        assert record["tokens"] or record["outcome"] == "refused", "what was sampled is kept"
    assert (run / "model/model.safetensors").is_file() and any((run / "checkpoints").iterdir())
