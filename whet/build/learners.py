"""Learners of a run: policy, critic, reference and teacher, as far as its algorithm needs them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from whet.algo.base import Algorithm, LearnsValues, Need, StepPlan
from whet.algo.policy import PolicyGradient
from whet.algo.table import build_algorithm
from whet.build.tables import check_tables
from whet.checkpoint.store import CheckpointStore
from whet.data.hub import resolve_model_path
from whet.data.template import load_tokenizer
from whet.model.causal import load_causal
from whet.model.config import ModelConfig
from whet.model.scalar import load_scalar
from whet.observe.devices import peak_tflops
from whet.observe.meter import Devices, Meter
from whet.rollout.sampling import RolloutConfig
from whet.settings.rl import BaseRunConfig, RunConfig
from whet.train.base import Annotator, Backend, Mirror
from whet.train.batching import BatchPlan, plan_batch
from whet.train.build import build_backend
from whet.train.config import CriticConfig, ReferenceConfig, TeacherConfig
from whet.train.controller import LOCAL, LOSSES, Controller
from whet.train.learners import Critic, Learners, Models, Refresh
from whet.train.remote_teacher import RemoteTeacher
from whet.train.torch_native.config import TrainConfig, check_compiled

SHOWN = 3
"""Maximum number of tokens that an error names."""


def algorithm_of(config: RunConfig) -> Algorithm:
    """Algorithm of a run, for the optimizer steps that its batch sizes give."""
    plan = plan_batch(config.batch)
    return build_algorithm(config.algo, StepPlan(plan.optimizer_steps, plan.samples_per_prompt, config.rollout.max_tokens))


def check_models(config: RunConfig, algorithm: Algorithm) -> None:
    """Refuse an algorithm whose models are missing, and settings of models that it does not need.

    Raises:
        ValueError: with the setting, and what to do.
    """
    name, needs = f"algo.name={config.algo.name}", algorithm.needs
    columns = {"teacher": Need.TEACHER_LOGPROBS, "reference": Need.REF_LOGPROBS, "critic": Need.VALUES}
    check_tables(config, {table: need in needs for table, need in columns.items()})
    if config.train.lora is not None and rests(config.reference) and config.reference is not None and config.reference.path is None:
        raise ValueError("reference.offload is set, but the reference of an adapter (train.lora) is the policy's own base: leave it out")
    if config.train.routing_replay == "old" and Need.OLD_LOGPROBS not in needs:
        raise ValueError(
            f"train.routing_replay=old replays what the pass over old log-probs chose, and {name} makes none here: set it to rollout, "
            "leave it out, or set algo.old_logprobs=recompute"
        )
    if config.batch.train_on == "all" and isinstance(algorithm, PolicyGradient) and algorithm.old_logprobs == "rollout":
        raise ValueError(
            "batch.train_on is all, but algo.old_logprobs is rollout: the engine has no log-probs of what the "
            "environment wrote; use recompute, or train_on=model"
        )
    if config.reward.group is not None and Need.BASELINE in needs:
        raise ValueError(
            f"reward.group is set, but {name} compares with a greedy trajectory, which has no siblings to be scored with: use reward.name, "
            "or an algorithm that compares siblings"
        )
    if Need.VALUES in needs and not isinstance(algorithm, LearnsValues):
        raise ValueError(f"{name} needs values, so it must say how a critic learns them: give it value_loss(batch, out)")
    if config.teacher is not None and config.teacher.urls and not sampled_plainly(config.rollout):
        raise ValueError(
            "teacher.urls: servers have log-probs of a prompt at temperature 1 and over the whole vocabulary alone: set "
            "rollout.temperature=1 and leave out top_p, top_k and min_p, or leave out teacher.urls"
        )
    check_layouts(config)


def sampled_plainly(rollout: RolloutConfig) -> bool:
    """True if replies are drawn from the model's own distribution."""
    return (rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p) == (1.0, 1.0, 0, 0.0)


def check_layouts(config: RunConfig) -> None:
    """Refuse an auxiliary model whose degrees ask for another number of processes, or that cannot be compiled
    as it is spread. Degrees of `auto` are checked once they are chosen.

    Raises:
        ValueError: naming the setting, and what to do.
    """
    if config.train.parallel == "auto":
        return
    processes = 1 if config.train.degrees is None else config.train.degrees.num_ranks
    for name, chosen in config.auxiliary.items():
        if chosen is not None and chosen.parallel is not None and chosen.parallel.num_ranks != processes:
            raise ValueError(
                f"{name}.parallel asks for {chosen.parallel.num_ranks} processes (replicate x shard x context x tensor), but "
                f"the policy has {processes}, and every process of the job has a part of every model: choose degrees whose product is "
                f"{processes}, or leave {name}.parallel out"
            )
        if chosen is not None and chosen.parallel is not None and config.train.compile:
            check_compiled(chosen.parallel, f"{name}.parallel")
    reference = config.reference or ReferenceConfig()
    own = reference.path is not None or reference.refresh_every is not None
    if config.train.lora is not None and reference.parallel is not None and not own:
        raise ValueError(
            "reference.parallel is set, but the reference of an adapter is its base, which the policy has already: leave it out, or name "
            "another model (reference.path)"
        )


def uncorrected(config: RunConfig, algorithm: Algorithm) -> str | None:
    """Advice if nothing corrects for training on tokens that older or quantized weights sampled; None: none is needed."""
    bound, quantization = config.control.max_staleness, config.engine.quantization
    reasons = [f"control.max_staleness={bound} trains on tokens that policies up to {bound} versions older sampled"] if bound else []
    reasons += [f"engine.quantization={quantization} samples from other weights than train"] if quantization is not None else []
    if not isinstance(algorithm, PolicyGradient) or algorithm.config.correction.used or algorithm.old_logprobs == "rollout" or not reasons:
        return None
    return (
        f"{', '.join(reasons)}, and nothing corrects for the "
        f"difference: set algo.correction.weights=token (truncated importance sampling), or algo.old_logprobs=rollout (the ratio is "
        "then over the policy that sampled)"
    )


def check_warmup(config: RunConfig, num_rollouts: int) -> int:
    """Number of rollouts in which the policy learns.

    Raises:
        ValueError: if there are none.
    """
    warmup = config.critic.warmup_rollouts if config.critic is not None else 0
    if warmup >= num_rollouts:
        raise ValueError(
            f"critic.warmup_rollouts is {warmup}, but the run has {num_rollouts} rollouts, so the policy would never learn: lower it, or "
            "train longer"
        )
    return num_rollouts - warmup


def build_learners(
    config: RunConfig,
    policy: Backend,
    folder: Path,
    algorithm: Algorithm,
    plan: BatchPlan,
    num_rollouts: int,
    controller: Controller = LOCAL,
) -> Learners:
    """Policy, critic, reference and teacher, as far as the algorithm needs them.

    Args:
        config: the run's settings; `check_models` has seen them.
        policy: the backend that trains.
        folder: the model that it began with.
        algorithm: credit and loss.
        plan: batch arithmetic.
        num_rollouts: of the run.
        controller: broadcasts calls of the models to the other ranks.
    """
    reference = refresh = teacher = critic = None
    if Need.REF_LOGPROBS in algorithm.needs:
        reference, refresh = _reference(config, policy, folder)
    if Need.TEACHER_LOGPROBS in algorithm.needs:
        assert config.teacher is not None
        teacher = _teacher(config, config.teacher, folder)
    if isinstance(algorithm, LearnsValues) and Need.VALUES in algorithm.needs:
        chosen = config.critic or CriticConfig()
        backend = _critic(config, chosen, folder, num_rollouts * plan.optimizer_steps)
        critic = Critic(backend, algorithm.value_loss, chosen.warmup_rollouts)
    controller.share(LOSSES, algorithm)
    return Learners(
        Models(policy, reference, refresh, teacher, critic).controlled(controller),
        algorithm,
        plan,
        config.seed,
        gives_back=config.engine_sleeps and config.num_engines_apart > 0,
        meter=meter_of(config, policy),
        replays_rollout=config.train.routing_replay == "rollout",
    )


def meter_of(config: BaseRunConfig, policy: Backend) -> Meter:
    """Meter of the passes of the policy, and of the auxiliary models on the same devices."""
    device, degrees, peak = policy.device, config.train.degrees, config.observe.peak_tflops
    if peak is None and device.type == "cuda":
        peak = peak_tflops(torch.cuda.get_device_name(device), policy.dtype)
    return Meter(Devices(device, 1 if degrees is None else degrees.num_ranks, peak))


def auxiliary_train(config: BaseRunConfig, chosen: CriticConfig | ReferenceConfig | TeacherConfig | None) -> TrainConfig:
    """Training settings of an auxiliary model: the policy's, with its own layout, and offloaded as it is itself."""
    train = config.train
    if chosen is not None and chosen.parallel is not None:
        train = train.model_copy(update={"parallel": chosen.parallel})
    return train.model_copy(update={"offload": True}) if rests(chosen) else train


def rests(chosen: CriticConfig | ReferenceConfig | TeacherConfig | None) -> bool:
    """True if an auxiliary model is in the CPU's memory between passes, whatever the policy does."""
    return isinstance(chosen, ReferenceConfig) and chosen.offload


def parallel_key(chosen: CriticConfig | ReferenceConfig | TeacherConfig | None, name: str) -> str:
    """Key of the layout of an auxiliary model, for error texts."""
    return "train.parallel" if chosen is None or chosen.parallel is None else f"{name}.parallel"


def critic_train(config: RunConfig, chosen: CriticConfig) -> TrainConfig:
    """Training settings of the critic: whole, with its own optimizer, within the policy's budgets."""
    return auxiliary_train(config, chosen).model_copy(update={"optim": chosen.optim, "lora": None, "freeze": []})


def check_same_tokens(folder: Path, policy_folder: Path, key: str, *, trust_remote_code: bool) -> None:
    """Refuse a model of another vocabulary, whose log-probs would be of other tokens.

    Raises:
        ValueError: with tokens that differ.
    """
    theirs, mine = (load_tokenizer(f, trust_remote_code=trust_remote_code).get_vocab() for f in (folder, policy_folder))
    odd = sorted(token for token in theirs.keys() | mine.keys() if theirs.get(token) != mine.get(token))
    if odd:
        shown = "; ".join(f"{token!r} is {theirs.get(token, 'not in it')}, not {mine.get(token, 'missing')}" for token in odd[:SHOWN])
        raise ValueError(
            f"{key}: the tokenizer of {folder} is not the policy's: {len(odd)} tokens differ ({shown}); it must read the "
            "same tokens, so choose a model of the policy's family"
        )


def build_reference(
    config: BaseRunConfig, folder: Path, policy: Backend, chosen: ReferenceConfig | None = None
) -> tuple[Annotator, Mirror | None]:
    """Frozen model that a run begins with: the base of an adapter, else a second copy.

    Args:
        config: the run's settings.
        folder: the model.
        policy: the backend that trains.
        chosen: how the copy is spread; None: as the policy.

    Returns:
        The reference; and again, if checkpoints have to hold it, since the run does not begin with the
        weights of `folder`.
    """
    if (base := policy.base()) is not None:
        return base, None
    copy = _copy(config, chosen, "reference", folder)
    store = CheckpointStore(Path(config.run_dir) / "checkpoints", config.checkpoint)
    return copy, copy if store.keeps_reference() else None


def _reference(config: RunConfig, policy: Backend, folder: Path) -> tuple[Annotator, Refresh | None]:
    """The reference, and what checkpoints hold of it, with the interval of its refreshes."""
    chosen = config.reference or ReferenceConfig()
    if chosen.path is None and chosen.refresh_every is None:
        reference, kept = build_reference(config, folder, policy, chosen)
        return reference, None if kept is None else Refresh(kept, None)
    backend = _frozen(config, chosen, "reference", folder, folder if chosen.path is None else resolve_model_path(chosen.path))
    return backend, None if chosen.refresh_every is None else Refresh(backend, chosen.refresh_every)


def _teacher(config: RunConfig, chosen: TeacherConfig, policy_folder: Path) -> Annotator:
    if not chosen.urls:
        return _frozen(config, chosen, "teacher", policy_folder, resolve_model_path(chosen.path))
    if (folder := resolve_model_path(chosen.path)) != policy_folder:
        check_same_tokens(folder, policy_folder, "teacher.path", trust_remote_code=config.model.trust_remote_code)
    teacher = RemoteTeacher(chosen.urls, chosen.timeout_s)
    if not dist.is_initialized() or dist.get_rank() == 0:
        teacher.connect(config.rollout.fixed_max_tokens)
    return teacher


def _frozen(config: RunConfig, chosen: ReferenceConfig | TeacherConfig, name: str, policy_folder: Path, folder: Path) -> Mirror:
    if folder == policy_folder:
        return _copy(config, chosen, name, folder)
    key = f"{name}.path"
    check_same_tokens(folder, policy_folder, key, trust_remote_code=config.model.trust_remote_code)
    return _copy(config, chosen, name, folder, key)


def settings_of(model: ModelConfig, key: str) -> ModelConfig:
    """The policy's settings for a model from another folder (`key` names it), whose config.json holds as it is."""
    return model if key == "model.path" else model.model_copy(update={"config": {}})


def _copy(
    config: BaseRunConfig, chosen: ReferenceConfig | TeacherConfig | None, name: str, folder: Path, key: str = "model.path"
) -> Mirror:
    """Model that does not train; `key` is the setting that names its folder."""
    train = auxiliary_train(config, chosen)
    model = load_causal(folder, settings_of(config.model, key), trainable=False, key=key, spread=train.spreads)
    return build_backend(train, model, None, parallel_key(chosen, name), rests=rests(chosen))


def _critic(config: RunConfig, chosen: CriticConfig, policy_folder: Path, total_steps: int) -> Backend:
    folder = policy_folder if chosen.path is None else resolve_model_path(chosen.path)
    key = "model.path" if folder == policy_folder else "critic.path"
    if folder != policy_folder:
        check_same_tokens(folder, policy_folder, key, trust_remote_code=config.model.trust_remote_code)
    train = critic_train(config, chosen)
    model = load_scalar(folder, settings_of(config.model, key), trainable=True, new_head="zeros", key="critic.path", spread=train.spreads)
    return build_backend(train, model, total_steps, parallel_key(config.critic, "critic"))
