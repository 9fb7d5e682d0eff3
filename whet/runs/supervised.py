"""`whet sft`, `whet dpo` and `whet rm`: what they do, as functions of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from whet.build.parts import build_observer, build_run_state, length_of_run
from whet.build.session import OpenRun, open_run
from whet.build.supervised import build_supervised
from whet.checkpoint.run_state import Stateful
from whet.core.batch import TrainBatch, batch_of
from whet.core.preference import pair_batch
from whet.core.weights import REDUCERS
from whet.data.hub import resolve_model_path
from whet.data.preference import PreferenceSource, preference_source
from whet.data.supervised import supervised_source
from whet.data.template import Renderer, load_renderer
from whet.loop import Evaluated
from whet.model.decoder import DecoderModel
from whet.observe.display import Headline
from whet.observe.metrics import Metrics, merge_metrics
from whet.runs.commands import batches_kept, finish, warn_all
from whet.settings.rl import BaseRunConfig
from whet.settings.supervised import DpoRunConfig, PairRunConfig, RewardModelRunConfig, SupervisedRunConfig, chat_of, held_out_rows
from whet.supervised_loop import HeldOut, SupervisedRun, train_supervised
from whet.train.alarm import Situation
from whet.train.lead import ALONE, Lead, begin

COMMON = (
    Headline("optim/grad_norm", "grad", ".3f"),
    Headline("optim/lr", "lr", ".2g"),
    Headline("tokens_per_second/update", "tok/s", ".0f"),
)
SFT_HEADLINES = (Headline("sft/loss", "loss", ".4f"), *COMMON)
DPO_HEADLINES = (
    Headline("dpo/loss", "loss", ".4f"),
    Headline("dpo/accuracy", "accuracy", ".3f"),
    Headline("dpo/margin", "margin", ".3f"),
    *COMMON,
)

RM_HEADLINES = (
    Headline("rm/loss", "loss", ".4f"),
    Headline("rm/accuracy", "accuracy", ".3f"),
    Headline("rm/margin", "margin", ".3f"),
    *COMMON,
)


@dataclass(frozen=True, slots=True)
class Program:
    """What makes one kind of run differ from another."""

    command: str
    headlines: tuple[Headline, ...]
    num_steps: int
    source: Stateful
    take: Callable[[], TrainBatch]
    """What the next step learns from, weighed."""
    facts: dict[str, str]
    held_out: PreferenceSource | None = None
    renderer: Renderer | None = None
    """Whose padding the model is to know, where transformers reads scores."""
    num_spelled: int = 0
    """Special tokens that the data's texts spell, and that are text."""


def sft(config: SupervisedRunConfig, command: str = "whet sft", lead: Lead = ALONE, notes: Sequence[str] = ()) -> Path:
    """`whet sft`: supervised fine-tuning to its end.

    Args:
        config: the run's settings.
        command: what was typed; the same goes on with a run that was stopped.
        lead: tells the other processes of the job what all of them do.
        notes: what the person who starts the run should know already.

    Returns:
        The folder of the exported model.
    """
    with open_run(config, command) as opened:
        folder, renderer = model_and_renderer(config)
        source = supervised_source(config.data, renderer, run_seed=config.seed)
        num_steps = length_of_run(len(source), config.samples_per_step, config.num_steps, config.num_epochs, "num_steps")
        reducer = REDUCERS[config.reducer]

        def take() -> TrainBatch:
            batch = batch_of(source.next(config.samples_per_step))
            return batch.with_(weights=reducer(batch))

        facts = {"conversations": str(len(source)), **spelled_facts(renderer)}
        program = Program("sft", SFT_HEADLINES, num_steps, source, take, facts, num_spelled=renderer.num_spelled)
        run_program(config, opened, folder, program, lead, notes)
    return opened.folder / "model"


def dpo(config: DpoRunConfig, command: str = "whet dpo", lead: Lead = ALONE, notes: Sequence[str] = ()) -> dict[str, float]:
    """`whet dpo`: direct preference optimization to its end, and the model exported to `<run_dir>/model`. Arguments as for `sft`.

    Returns:
        `eval/...` of the held-out pairs at the end; nothing if there are none.
    """
    with open_run(config, command) as opened:
        folder, renderer = model_and_renderer(config)
        return run_program(config, opened, folder, on_pairs(config, renderer, "dpo", DPO_HEADLINES), lead, notes)


def reward_model(
    config: RewardModelRunConfig, command: str = "whet rm", lead: Lead = ALONE, notes: Sequence[str] = ()
) -> dict[str, float]:
    """`whet rm`: a reward model to its end, exported to `<run_dir>/model` for `AutoModelForSequenceClassification`. As `dpo` otherwise."""
    with open_run(config, command) as opened:
        folder, renderer = model_and_renderer(config)
        program = replace(on_pairs(config, renderer, "rm", RM_HEADLINES), renderer=renderer)
        return run_program(config, opened, folder, program, lead, notes)


def on_pairs(config: PairRunConfig, renderer: Renderer, command: str, headlines: tuple[Headline, ...]) -> Program:
    """What runs on preference pairs have in common."""
    source, held = pair_sources(config, renderer)
    num_steps = length_of_run(len(source), config.pairs_per_step, config.num_steps, config.num_epochs, "num_steps")

    def take() -> TrainBatch:
        return pair_batch(source.next(config.pairs_per_step))

    facts = {**pair_facts(source, held), **spelled_facts(renderer)}
    return Program(command, headlines, num_steps, source, take, facts, held, num_spelled=renderer.num_spelled)


def spelled_facts(renderer: Renderer) -> dict[str, str]:
    """Special tokens that the data spell, where there are any."""
    num = renderer.num_spelled
    return {"special tokens": f"{num} spelled in the data's texts stay text (data.special_tokens_in_text)"} if num else {}


def note_padding(model: DecoderModel, renderer: Renderer) -> None:
    """Have transformers read a batch's scores where whet does, at each last token: it goes by the config's padding, in which no
    turn may end."""
    text = model.config.get_text_config()
    pad = renderer.tokenizer.pad_token_id if text.pad_token_id is None else text.pad_token_id
    text.pad_token_id = None if pad in renderer.stop_token_ids else pad


def model_and_renderer(config: BaseRunConfig) -> tuple[Path, Renderer]:
    """The model's folder, and its tokenizer with its chat template."""
    folder = resolve_model_path(config.model.path)
    return folder, load_renderer(folder, chat_of(config), trust_remote_code=config.model.trust_remote_code)


def pair_sources(config: PairRunConfig, renderer: Renderer) -> tuple[PreferenceSource, PreferenceSource | None]:
    """The training pairs, and those held out."""
    rows = held_out_rows(config)
    held = None if rows is None else preference_source(rows, renderer, run_seed=config.seed, name="held_out")
    return preference_source(config.data, renderer, run_seed=config.seed), held


def pair_facts(source: PreferenceSource, held: PreferenceSource | None) -> dict[str, str]:
    """What is good to know about the pairs before a run."""
    left_out = f" ({source.num_dropped} too long, {source.num_same} with two equal replies left out)"
    facts = {"pairs": f"{len(source)}" + (left_out if source.num_dropped or source.num_same else "")}
    return facts if held is None else {**facts, "held out": str(len(held))}


def held_out(config: BaseRunConfig, held: PreferenceSource | None, measure: Callable[[TrainBatch], Metrics]) -> HeldOut | None:
    """Every held-out pair through `measure`, a step's worth at a time; its metrics are `eval/...` then."""
    if held is None:
        return None
    assert isinstance(config, PairRunConfig), "pairs are held out of pairs"
    pairs = held.all()

    def measure_all() -> Metrics:
        metrics: Metrics = {}
        for start in range(0, len(pairs), config.pairs_per_step):
            metrics = merge_metrics(metrics, measure(pair_batch(pairs[start : start + config.pairs_per_step])))
        return {f"eval/{name}": value for name, value in metrics.items()}

    return HeldOut(measure_all, config.evaluate.interval, config.evaluate.before_training)


def run_program(
    config: BaseRunConfig, opened: OpenRun, folder: Path, program: Program, lead: Lead, notes: Sequence[str]
) -> dict[str, float]:
    """Train to the end, with everything that any run has: checkpoints, metrics, a display, a model at the end."""
    with closing(build_observer(config, opened, program.headlines)) as observer:
        with lead.tell(begin(program.num_steps)):
            backend, learner = build_supervised(config, folder, program.num_steps, lead)
        if program.renderer is not None:
            note_padding(backend.model, program.renderer)
        evaluated = Evaluated()
        others: dict[str, Stateful] = {"evaluated": evaluated}
        state = build_run_state(config, opened, learner.policy, observer, program.source, others, learner, lead)
        measured = held_out(config, program.held_out, learner.measure)
        run = SupervisedRun(
            program.num_steps, program.take, learner, measured, evaluated, state, observer, opened.stop, program.num_spelled
        )
        lead.describe(lambda: Situation(observer.phases.present))
        facts = {"model": str(folder), **program.facts, "device": str(backend.model.device)}
        for note in notes:
            observer.display.note(note)
        observer.display.start(f"whet {program.command}: {opened.folder}", program.num_steps, facts)
        warn_all(observer.display, [*opened.notes, *learner.notes])
        with batches_kept(config, opened, lambda _: learner.policy), run.checkpoint.whole():
            values = train_supervised(run)
        finish(config, observer, backend, folder, opened.folder, lead)
    return values
