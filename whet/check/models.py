"""Auxiliary models, such as critic and reference: read by their config.json, with their memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from whet.algo.base import Algorithm, Need
from whet.build.learners import check_same_tokens, critic_train, parallel_key, rests, settings_of
from whet.check.auxiliary import AuxiliaryModels
from whet.check.context import CheckContext
from whet.check.findings import Note, fail, ok
from whet.data.hub import resolve_model_path
from whet.engine.base import EngineFailed
from whet.engine.servers.http import KEY, HttpServer
from whet.engine.servers.kinds import kind_at
from whet.model.causal import pick_device
from whet.model.config import ModelConfig
from whet.model.decoder import DecoderModel
from whet.model.meta import read_meta, read_meta_scalar
from whet.model.scalar import ScalarModel
from whet.plan.activations import forward_bytes
from whet.plan.memory import ALWAYS, TRAINING, MemoryPlan, Part, Phase, Workload, largest_row, plan_memory
from whet.plan.mesh_memory import MeshPlanner, Planned, local_tensors, put_together
from whet.reward.build import reward_models
from whet.reward.model import ModelRewardOptions
from whet.reward.model_reward import KEY as REWARD_PATH
from whet.reward.model_reward import model_config
from whet.settings.rl import RunConfig, reward_tables
from whet.train.config import CriticConfig, TeacherConfig
from whet.train.remote_teacher import check_length
from whet.train.torch_native.config import ParallelConfig


def check_auxiliary(context: CheckContext, folder: Path) -> Iterator[Note]:
    """Check critic, reference and teacher by their config.json; `folder` is the policy's."""
    if context.algorithm is None:
        return
    auxiliary = context.auxiliary = auxiliary_models(context.rl, context.algorithm, folder)
    for name, model in {**auxiliary.frozen, **({"critic": auxiliary.critic} if auxiliary.critic is not None else {})}.items():
        count = sum(p.numel() for _, p in model.named_weights())
        yield ok(f"{name}: {type(model.hf).__name__}, {count / 1e6:.1f}M parameters")
    if Need.TEACHER_LOGPROBS in context.algorithm.needs and context.rl.teacher is not None:
        yield from _remote_teacher(context.rl.teacher, context.rl.rollout.fixed_max_tokens)


def _remote_teacher(chosen: TeacherConfig, longest: int | None) -> Iterator[Note]:
    """Look whether the servers of a teacher are there, and score samples of `longest` tokens."""
    key = os.environ.get(KEY)
    for url in chosen.urls:
        name = f"teacher at {url}"
        try:
            kind, _ = kind_at(name, url, key)
            check_length(name, kind.connect_fixed(HttpServer(name, url, key), key), longest)
        except (EngineFailed, ValueError) as error:
            yield fail(f"teacher.urls: {str(error).removeprefix('teacher.urls: ')}")
        else:
            yield ok(f"teacher: a server answers at {url}")


def auxiliary_models(config: RunConfig, algorithm: Algorithm, folder: Path) -> AuxiliaryModels:
    """Read the auxiliary models of an algorithm by their config.json; `folder` is the policy's.

    Raises:
        ValueError: if one cannot be had, or reads other tokens than the policy.
    """
    needs, models = algorithm.needs, dict[str, Planned]()
    if Need.TEACHER_LOGPROBS in needs and config.teacher is not None and not config.teacher.urls:
        models["teacher"] = read_meta(*_found(config.model, config.teacher.path, folder, "teacher.path"), key="teacher.path")
    if Need.REF_LOGPROBS in needs and has_own_reference(config):
        path = config.reference.path if config.reference is not None else None
        models["reference"] = read_meta(*_found(config.model, path, folder, "reference.path"), key="reference.path")
    rewards = _reward_models(config)
    models.update({name: model for name, (model, _) in rewards.items()})
    critic = None
    if Need.VALUES in needs:
        path = (config.critic or CriticConfig()).path
        critic = read_meta_scalar(*_found(config.model, path, folder, "critic.path"), key="critic.path")
    room = {name: options.batch_tokens for name, (_, options) in rewards.items()}
    return AuxiliaryModels(models, critic, room, frozenset(name for name, (_, options) in rewards.items() if options.spread))


def _reward_models(config: RunConfig) -> dict[str, tuple[ScalarModel, ModelRewardOptions]]:
    """Reward models on the policy's device, with their options, as often as each is loaded.

    Evaluation sets with rewards of their own load their own models, unless these are spread.
    """
    models: dict[str, tuple[ScalarModel, ModelRewardOptions]] = {}
    for options in (options for table in reward_tables(config) for options in reward_models(table)):
        if options.spread and any(options == other for _, other in models.values()):
            continue
        if pick_device(options.device).type == pick_device(config.model.device).type:
            name = f"reward {len(models) + 1}" if models else "reward"
            models[name] = read_meta_scalar(resolve_model_path(options.path), model_config(options), key=REWARD_PATH), options
    return models


def has_own_reference(config: RunConfig) -> bool:
    """True if the reference is planned by itself: a model of its own even for an adapter, or in a layout of
    its own.
    """
    chosen = config.reference
    return chosen is not None and (
        chosen.path is not None or chosen.refresh_every is not None or chosen.parallel is not None or chosen.offload
    )


def auxiliary_parts(auxiliary: AuxiliaryModels, config: RunConfig, work: Workload) -> list[Part]:
    """Memory of the auxiliary models on a device. On a mesh it is a rank's share; the first process holds
    reward models that are not spread whole.
    """
    spread = {name: degrees for name, _, degrees, _ in auxiliary.over_ranks(config)}
    on_gpu = pick_device(config.model.device).type != "cpu"
    resting = {name for name, chosen in config.auxiliary.items() if on_gpu and rests(chosen)}
    parts = [
        Part(
            f"{name} model",
            _held(model, spread.get(name), offloaded=work.offloaded or name in resting),
            ("frozen",) if name in resting else ALWAYS,
            "set reference.offload=true" if name == "reference" and name not in resting else f"choose a smaller {name}",
        )
        for name, model in auxiliary.frozen.items()
    ]  # a reward model that is not spread, the first process holds whole
    parts += _put_together(auxiliary, config)
    parts += _scoring(auxiliary, config, work)
    if auxiliary.critic is not None:
        plan = _critic_plan(auxiliary.critic, config, work)
        kept, gradients = plan.bytes_of("float32 masters") + plan.bytes_of("optimizer moments"), plan.bytes_of("gradients")
        smaller, parameters = "choose a smaller critic (critic.path)", plan.bytes_of("parameters")
        worst = plan.peak_bytes - parameters - kept - gradients
        advice = next(part.advice for part in plan.largest(len(plan.parts)) if part.during not in (ALWAYS, TRAINING))
        parts += [
            Part("critic's parameters", parameters, ALWAYS, smaller),
            Part("critic's masters and moments", kept, ALWAYS, smaller),
            Part("critic's gradients", gradients, ("critic",), smaller),
            Part("critic's step or activations", worst, ("critic",), advice, True),
        ]
    return parts


def _put_together(auxiliary: AuxiliaryModels, config: RunConfig) -> Iterator[Part]:
    """Memory of the layers that a rank gathers while a spread model computes that does not train: the present
    layer, the next, and all parameters outside of layers.

    Reference and teacher take turns, so the larger one counts.
    """
    found = dict[Phase, Part]()
    for name, model, degrees, key in auxiliary.over_ranks(config):
        if name in auxiliary.frozen:
            layer, rest = put_together(model, degrees)
            phase: Phase = "rollout" if name in auxiliary.spread else "frozen"
            size = (2 * layer + rest) * model.dtype.itemsize
            part = Part(f"{name}'s layers put together", size, (phase,), f"raise {key}.tensor", estimate=True)
            found[phase] = max(part, found.get(phase, part), key=lambda part: part.size_bytes)
    yield from found.values()


def _critic_plan(model: ScalarModel, config: RunConfig, work: Workload) -> MemoryPlan:
    """Memory plan of the critic, as of a run that trains it alone."""
    train = critic_train(config, config.critic or CriticConfig())
    degrees = train.degrees
    own = Workload(train, _own_row(work, config.train.degrees, degrees), offloaded=work.offloaded)
    if degrees is None:
        return plan_memory(model, own)
    return MeshPlanner(model, config.model, parallel_key(config.critic, "critic")).plan(own, degrees)


def _own_row(work: Workload, policy: ParallelConfig | None, own: ParallelConfig | None) -> tuple[int, ...]:
    """Lengths in the largest row of a model with its own degrees.

    The ranks of `context` share a row. It is as long as their budgets together, or as its longest sample.
    """
    shared, by = (1 if degrees is None else degrees.context for degrees in (policy, own))
    if shared == by:
        return work.lengths
    return (max(-(-sum(work.lengths) // shared) * by, max(work.lengths)),)


def _scoring(auxiliary: AuxiliaryModels, config: RunConfig, work: Workload) -> Iterator[Part]:
    """Memory of the largest row that the reward models score, which they do while the engine runs."""
    assert work.sampling is not None, "a run with rewards samples"
    longest = (work.sampling.longest,)
    for name, room in auxiliary.batch_tokens.items():
        lengths = longest if config.deterministic else largest_row(longest, room, work.sampling.together)
        advice = "lower rollout.max_tokens" if len(lengths) == 1 else "lower the reward's options.batch_tokens"
        yield Part(f"{name} scores", forward_bytes(auxiliary.frozen[name], lengths), ("rollout",), advice, estimate=True)


def _found(config: ModelConfig, path: str | None, policy_folder: Path, key: str) -> tuple[Path, ModelConfig]:
    """Folder of an auxiliary model, and how it is read."""
    folder = policy_folder if path is None else resolve_model_path(path)
    if folder == policy_folder:
        return folder, config
    check_same_tokens(folder, policy_folder, key, trust_remote_code=config.trust_remote_code)
    return folder, settings_of(config, key)


def _weights(model: DecoderModel) -> int:
    return sum(p.nbytes for _, p in model.named_weights())


def _held(model: DecoderModel, degrees: ParallelConfig | None, *, offloaded: bool) -> int:
    """Bytes of a frozen model that are always on a device; 0 if a mesh offloads it."""
    if degrees is None:
        return _weights(model)
    return 0 if offloaded else sum(p.nbytes for p in local_tensors(model, degrees, model.dtype).values())
