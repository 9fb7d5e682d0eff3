"""`whet sft`, `whet dpo` and `whet rm`: what they do, as functions of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from whet.algo.base import LossFunction, Need
from whet.algo.dpo import dpo_loss
from whet.algo.reward_model import reward_model_loss
from whet.algo.sft import sft_loss
from whet.build import build_observer, build_run_state, length_of_run
from whet.build_learners import build_reference, meter_of
from whet.checkpoint.run_state import Stateful
from whet.checkpoint.store import REFERENCE
from whet.commands import batches_kept, finish, warn_all
from whet.core.batch import TokenOutputs, TrainBatch, batch_of
from whet.core.preference import pair_batch
from whet.core.weights import REDUCERS
from whet.data.hub import resolve_model_path
from whet.data.preference import PreferenceSource, preference_source
from whet.data.supervised import supervised_source
from whet.data.template import Renderer, load_tokenizer
from whet.loop import Evaluated
from whet.model.causal import load_causal
from whet.model.scalar import ScalarModel, load_scalar
from whet.observe import Headline, Meter, Metrics, merge_metrics
from whet.opened import OpenRun, open_run
from whet.settings import BaseRunConfig
from whet.supervised_loop import HeldOut, SupervisedRun, train_supervised
from whet.supervised_settings import DpoRunConfig, PairRunConfig, RewardModelRunConfig, SupervisedRunConfig, held_out_rows
from whet.train.base import Annotator, Backend
from whet.train.learners import notes_beside
from whet.train.torch_native.backend import TorchBackend

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
class Job:
    """What makes one kind of run differ from another."""

    command: str
    headlines: tuple[Headline, ...]
    num_steps: int
    source: Stateful
    take: Callable[[], TrainBatch]
    loss: LossFunction
    held_out: HeldOut | None
    facts: dict[str, str]
    meter: Meter
    reference: Annotator | None = None
    kept_reference: Backend | None = None
    """The reference, where checkpoints hold it."""


def sft(config: SupervisedRunConfig, command: str = "whet sft") -> Path:
    """`whet sft`: supervised fine-tuning to its end.

    Args:
        config: the run's settings.
        command: what was typed; the same goes on with a run that was stopped.

    Returns:
        The folder of the exported model.
    """
    with open_run(config, command) as opened:
        folder, renderer = model_and_renderer(config)
        source = supervised_source(config.data, renderer, run_seed=config.seed)
        num_steps = length_of_run(len(source), config.samples_per_step, config.num_steps, config.num_epochs, "num_steps")
        backend = TorchBackend(load_causal(folder, config.model, trainable=True), config.train, num_steps)
        reducer = REDUCERS[config.reducer]

        def take() -> TrainBatch:
            batch = batch_of(source.next(config.samples_per_step))
            return batch.with_(weights=reducer(batch))

        facts = {"model": str(folder), "conversations": str(len(source)), "device": str(backend.model.device)}
        job = Job("sft", SFT_HEADLINES, num_steps, source, take, sft_loss, None, facts, meter_of(config, backend))
        run_job(config, opened, folder, backend, job)
    return opened.folder / "model"


def dpo(config: DpoRunConfig, command: str = "whet dpo") -> dict[str, float]:
    """`whet dpo`: direct preference optimization to its end, and the model exported to `<run_dir>/model`. Arguments as for `sft`.

    Returns:
        `eval/...` of the held-out pairs at the end; nothing if there are none.
    """
    with open_run(config, command) as opened:
        folder, renderer = model_and_renderer(config)
        source, held = pair_sources(config, renderer)
        num_steps = length_of_run(len(source), config.pairs_per_step, config.num_steps, config.num_epochs, "num_steps")
        backend = TorchBackend(load_causal(folder, config.model, trainable=True), config.train, num_steps)
        reference, kept = build_reference(config, folder, backend)
        loss, meter = dpo_loss(config.dpo), meter_of(config, backend)

        def take() -> TrainBatch:
            batch = pair_batch(source.next(config.pairs_per_step))
            with meter.phase(Need.REF_LOGPROBS.value, reference):
                return reference.annotate(batch, Need.REF_LOGPROBS)

        def judge(batch: TrainBatch) -> Metrics:
            batch = backend.annotate(reference.annotate(batch, Need.REF_LOGPROBS), Need.OLD_LOGPROBS)
            assert batch.old_logprobs is not None
            return loss(batch, TokenOutputs(batch.old_logprobs, torch.zeros_like(batch.old_logprobs))).metrics

        facts = {"model": str(folder), **pair_facts(source, held), "device": str(backend.model.device)}
        measured = held_out(config, held, judge)
        job = Job("dpo", DPO_HEADLINES, num_steps, source, take, loss, measured, facts, meter, reference, kept)
        return run_job(config, opened, folder, backend, job)


def reward_model(config: RewardModelRunConfig, command: str = "whet rm") -> dict[str, float]:
    """`whet rm`: a reward model to its end, exported to `<run_dir>/model` for `AutoModelForSequenceClassification`. As `dpo` otherwise."""
    with open_run(config, command) as opened:
        folder, renderer = model_and_renderer(config)
        source, held = pair_sources(config, renderer)
        num_steps = length_of_run(len(source), config.pairs_per_step, config.num_steps, config.num_epochs, "num_steps")
        model = load_scalar(folder, config.model, trainable=True, new_head="normal", seed=config.seed)
        note_padding(model, renderer)
        backend = TorchBackend(model, config.train, num_steps)
        loss = reward_model_loss(config.rm)

        def take() -> TrainBatch:
            return pair_batch(source.next(config.pairs_per_step))

        def judge(batch: TrainBatch) -> Metrics:
            batch = backend.annotate(batch, Need.SCORES)
            assert batch.scores is not None
            nothing = torch.zeros_like(batch.scores)
            return loss(batch, TokenOutputs(nothing, nothing, scores=batch.scores)).metrics

        facts = {"model": str(folder), **pair_facts(source, held), "device": str(model.device)}
        measured = held_out(config, held, judge)
        job = Job("rm", RM_HEADLINES, num_steps, source, take, loss, measured, facts, meter_of(config, backend))
        return run_job(config, opened, folder, backend, job)


def note_padding(model: ScalarModel, renderer: Renderer) -> None:
    """Have transformers read a batch's scores where whet does, at each last token: it goes by the config's padding, in which no
    turn may end."""
    text = model.config.get_text_config()
    pad = renderer.tokenizer.pad_token_id if text.pad_token_id is None else text.pad_token_id
    text.pad_token_id = None if pad in renderer.stop_token_ids else pad


def model_and_renderer(config: BaseRunConfig) -> tuple[Path, Renderer]:
    """The model's folder, and its tokenizer with its chat template."""
    folder = resolve_model_path(config.model.path)
    return folder, Renderer(load_tokenizer(folder, trust_remote_code=config.model.trust_remote_code))


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


def held_out(config: PairRunConfig, held: PreferenceSource | None, judge: Callable[[TrainBatch], Metrics]) -> HeldOut | None:
    """Every held-out pair through `judge`, a step's worth at a time; its metrics are `eval/...` then."""
    if held is None:
        return None
    pairs = held.all()

    def measure() -> Metrics:
        metrics: Metrics = {}
        for start in range(0, len(pairs), config.pairs_per_step):
            metrics = merge_metrics(metrics, judge(pair_batch(pairs[start : start + config.pairs_per_step])))
        return {f"eval/{name}": value for name, value in metrics.items()}

    return HeldOut(measure, config.evaluate.interval, config.evaluate.before_training)


def run_job(config: BaseRunConfig, opened: OpenRun, folder: Path, backend: TorchBackend, job: Job) -> dict[str, float]:
    """Train to the end, with everything that any run has: checkpoints, metrics, a display, a model at the end."""
    with closing(build_observer(config, opened, job.headlines)) as observer:
        evaluated = Evaluated()
        beside = {} if job.kept_reference is None else {REFERENCE: job.kept_reference}
        state = build_run_state(config, opened, backend, observer, job.source, {"evaluated": evaluated}, beside)
        run = SupervisedRun(job.num_steps, job.take, job.loss, backend, job.held_out, evaluated, state, observer, job.meter, opened.stop)
        observer.display.start(f"whet {job.command}: {opened.folder}", job.num_steps, job.facts)
        warn_all(observer.display, [*opened.notes, *backend.notes, *notes_beside({"reference": job.reference})])
        with batches_kept(config, opened, lambda _: backend), run.checkpoint.whole():
            values = train_supervised(run)
        finish(config, observer, backend, folder, opened.folder)
    return values
