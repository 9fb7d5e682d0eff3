"""Checks of the model folder: configuration, headers of the weights, attention on a small twin, and
tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from whet.build.engine import copy_devices, quantization_of
from whet.check.boundary import run_user_code
from whet.check.context import CheckContext
from whet.check.findings import Note, fail, need, ok, skip, warn
from whet.check.models import check_auxiliary
from whet.check.settings import IMPORT_DEADLINE_S
from whet.data.formats.format import Format
from whet.data.formats.table import AUTO, build_format
from whet.data.hub import resolve_model_path
from whet.data.template import Renderer, load_renderer
from whet.data.tokenizer import turn_ends
from whet.engine.servers.pool import names_in_format
from whet.model.causal import CausalModel, pick_device
from whet.model.contents import Contents
from whet.model.freezing import freeze
from whet.model.headers import weight_files
from whet.model.lora import add_adapter
from whet.model.routing import Routers
from whet.model.scalar import ScalarModel, is_headless
from whet.model.twin import NoTwin, small_twin
from whet.plan.memory import trained_weights
from whet.plan.text import bytes_text, several
from whet.settings.supervised import chat_of

SHOWN = 3
"""Maximum number of names in a line."""


def check_device(context: CheckContext) -> Iterator[Note]:
    """Check the device, and those of the engine's copies."""
    config = context.config.model
    device = pick_device(config.device)
    if device.type == "mps" and config.dtype == "float64":
        yield fail("model.dtype is float64, which mps does not have; use float32, or model.device=cpu")
    else:
        yield ok(f"{device}, {config.dtype}")
    if context.program.unit == "rollout" and (engine := context.rl.engine.embedded).num_processes > 1:
        devices = copy_devices(engine, config)
        split = f" of {engine.tensor_parallel}" if engine.tensor_parallel > 1 else ""
        yield ok(f"engine.embedded.copies: {engine.copies}{split}, on {', '.join(devices)}")


def check_model(context: CheckContext) -> Iterator[Note]:
    """Check the model's configuration and weights."""
    config = context.config.model
    folder = context.folder = resolve_model_path(config.path)
    model = context.model = context.program.model.read_meta(folder, config)
    layers = model.config.get_text_config().num_hidden_layers
    count = sum(p.numel() for _, p in model.named_weights())
    yield ok(f"{type(model.hf).__name__}, {layers} layers, {count / 1e6:.1f}M parameters, {model.max_positions} positions ({folder})")
    if model.rotary_limit is not None:
        reach = f"sequences of up to {model.rotary_limit} tokens"
        yield ok(f"{reach}: longer ones are refused, since its rotary scaling would depend on a sample's company")
    yield from _weights(folder, model)
    if (lora := context.config.train.lora) is not None:
        add_adapter(model, lora)
        trained = sum(p.numel() for p in trained_weights(model).values())
        share = f"{trained / 1e6:.2f}M parameters train ({trained / count:.1%} of the model's)"
        yield ok(f"train.lora: an adapter of rank {lora.rank}, {share}")
    if context.config.train.freeze:
        frozen = freeze(model.hf, context.config.train.freeze)
        yield ok(f"train.freeze: {frozen / 1e6:.2f}M parameters stay as they are ({frozen / count:.1%} of the model's)")
    if (replay := context.config.train.routing_replay) != "off":
        routers = Routers(model.hf)
        yield ok(
            f"train.routing_replay: {replay}, in {several(len(routers.layers), 'layer')} with {routers.num_experts} experts, of which a "
            f"token goes to {routers.top_k}"
        )
    if context.program.unit == "rollout" and (name := context.rl.engine.quantization) is not None:
        assert isinstance(model, CausalModel), "a policy samples"
        _, quantization = quantization_of(name, folder)
        yield ok(f"engine.quantization: {name}, {several(len(names_in_format(model, quantization)), 'tensor')} are sent to the servers")
    yield from check_auxiliary(context, folder)


def _weights(folder: Path, model: CausalModel | ScalarModel) -> Iterator[Note]:
    contents = Contents(model.hf, folder, headless=isinstance(model, ScalarModel) and is_headless(model.config))
    files, headers = weight_files(folder), contents.headers.values()
    size = sum(path.stat().st_size for path in files)
    kinds = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in headers}))
    if contents.missing:
        names = ", ".join(contents.missing[:SHOWN])
        yield fail(f"weights: {len(contents.missing)} tensors that config.json asks for are not in {folder}, among them {names}")
    if contents.misfits:
        shown = "; ".join(contents.misfits[:SHOWN])
        yield fail(f"weights: {len(contents.misfits)} tensors in {folder} do not fit config.json: {shown}")
    if contents.unused:
        names = ", ".join(contents.unused[:SHOWN])
        yield fail(f"weights: {len(contents.unused)} tensors in {folder} have no place in the model, among them {names}")
    if not (contents.missing or contents.misfits or contents.unused):
        what = f"{len(headers)} tensors in {several(len(files), 'file')}, {bytes_text(size)} of {kinds}"
        yield ok(f"weights: {what}; every tensor of the model is there, in its shape")


def check_attention(context: CheckContext) -> Iterator[Note]:
    """Compare whet's attention with the architecture's own, on a small random model."""
    model = need(context.model, "the model's config.json")
    try:
        twin = small_twin(model.config, context.config.model)
    except NoTwin as reason:
        yield skip(f"not compared: no small model can be made of this config.json ({reason}); the run compares the whole one")
        return
    asked = f"a random model of {twin.config.get_text_config().num_hidden_layers} of its layers was asked"
    try:
        twin.check()
    except (ValueError, RuntimeError, TypeError) as error:
        yield fail(f"{error} ({asked})")
        return
    yield ok(f"{type(twin.hf).__name__} gives its own logits through whet's attention ({asked})")


def check_tokenizer(context: CheckContext) -> Iterator[Note]:
    """Check the tokenizer, its special tokens and its chat template."""
    config = context.config
    folder = need(context.folder, "the model's folder")
    parser: str | Format = AUTO
    added = ()
    if context.program.unit == "rollout":
        name, added = context.rl.env.parser, context.rl.rollout.stop_token_ids
        parser = name if name == AUTO else run_user_code(f"parser {name!r}", lambda: build_format(name), IMPORT_DEADLINE_S)
    renderer = context.renderer = load_renderer(folder, chat_of(config), parser, trust_remote_code=config.model.trust_remote_code)
    tokenizer = renderer.tokenizer
    yield from _sizes(len(tokenizer), context.vocab_size)
    stops = tuple(dict.fromkeys((*renderer.stop_token_ids, *added)))
    if strange := [token for token in stops if not 0 <= token < (context.vocab_size or len(tokenizer))]:
        yield fail(f"stop tokens {strange} are not in the vocabulary: correct rollout.stop_token_ids, or the tokenizer's eos_token")
    known = [token for token in stops if 0 <= token < len(tokenizer)]
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    yield ok(
        f"eos {_named(renderer, eos)}, pad {_named(renderer, pad) if pad is not None else 'none'}; "
        f"a turn ends at {', '.join(_named(renderer, token) for token in known)}"
    )
    yield from _own_ends(turn_ends(folder), renderer, stops)
    if renderer.has_template:
        yield ok("it has a chat template" if chat_of(config).template is None else "it has a chat template, data.template")
    elif context.program.unit == "rollout" and not context.rl.data.chat:
        yield ok("it has no chat template, and data.chat is false: prompts are plain text")
    else:
        yield fail("it has no chat template: put the model's chat_template.jinja into its folder, or set data.chat=false for plain text")
    if context.program.unit == "rollout":
        yield from _calls_read(context, renderer, parser)


def _calls_read(context: CheckContext, renderer: Renderer, parser: str | Format) -> Iterator[Note]:
    """Find the format in which tool calls are read."""
    env = context.rl.env
    try:
        context.renderer = renderer.with_parser(parser, answers=env.answers or context.rl.rollout.play is not None)
    except ValueError as error:
        yield fail(str(error))
        return
    if env.answers:
        yield ok(f"env.parser={env.parser}: tool calls are read as {context.renderer.format.name} ({context.renderer.chosen.why})")


def _sizes(num_tokens: int, vocab_size: int | None) -> Iterator[Note]:
    if vocab_size is None:
        yield skip(f"{num_tokens} tokens; not compared with the model: needs its config.json")
    elif num_tokens > vocab_size:
        yield warn(f"{num_tokens} tokens, but the model knows {vocab_size}: a text with one of the others cannot run")
    else:
        yield ok(f"{num_tokens} tokens, the model knows {vocab_size}")


def _named(renderer: Renderer, token: object) -> str:
    assert isinstance(token, int)
    return f"{renderer.decode([token])!r} ({token})"


def _own_ends(ends: Sequence[int], renderer: Renderer, stops: Sequence[int]) -> Iterator[Note]:
    """Compare the ends of a turn in generation_config.json with the tokenizer's."""
    eos = renderer.tokenizer.eos_token_id
    if not ends or eos in ends:
        return
    names = ", ".join(_named(renderer, token) if token < len(renderer.tokenizer) else str(token) for token in ends)
    ignored = [token for token in ends if token not in stops]
    then = f"{ignored} are no added tokens; if the model ends its turns with them, set rollout.stop_token_ids={ignored}"
    then = then if ignored else "either ends a turn"
    yield warn(f"generation_config.json ends at {names}, the tokenizer at {_named(renderer, eos)}: {then}")
