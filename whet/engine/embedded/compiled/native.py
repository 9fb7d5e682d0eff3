"""A decode step in compiled code: one token for each sequence, from the model's own tensors and the blocks of the cache.

It computes what transformers' modules do for the architectures of `FAMILIES`, and is compared with them before it is used. Weights are read
where they lie: an update is seen as the modules see it, and its proof (digests of those tensors, a probe through this path) covers it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whet.engine.embedded.cache import KVStore
from whet.engine.embedded.compiled.library import DecodeStep, Logits, NotCompiled, library
from whet.engine.embedded.paged import PaddedPart, lay_out
from whet.engine.embedded.pages import ask_for_huge_pages
from whet.engine.embedded.rows import block_tables
from whet.engine.embedded.scheduler import Sequence
from whet.model.attention import PackedRow
from whet.model.causal import CausalModel
from whet.types import Request, SamplingParams
from whet.types.columns import Ints

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""transformers' `model_type`s: decoders with RMS norms, rotated heads (Llama's halves) and a SwiGLU MLP, in layers of the same names."""
WORK_PER_THREAD = 4_000_000
"""Multiplications that a step must have for each thread that takes part."""
POSITIONS = 1024
"""Number of positions whose rotation is computed at first."""
CHECKED = ((40, 2), (5, 2), (1, 3))
"""Lengths of the sequences of a check, and how many of their last tokens are decoded."""
TOLERANCE = 1e-4
"""Largest distance of the checked states and logits from the modules', relative to their norm."""


class NativeDecode:
    """The compiled step of a model.

    Args:
        model: model whose tensors it reads; on the CPU.

    Raises:
        NotCompiled: if it cannot be compiled, or knows no model like this; the text says why.
    """

    def __init__(self, model: CausalModel) -> None:
        fault = unfit(model)
        if fault is not None:
            raise NotCompiled(fault)
        self._library = library()
        self._model = model
        decoder: Any = model.decoder
        config = decoder.config
        first = decoder.layers[0].self_attn
        self._layers: list[nn.Module] = list(decoder.layers)
        self._rotary, self._embed, self._final_norm = decoder.rotary_emb, decoder.embed_tokens, decoder.norm
        self._shape = DecodeStep(
            layers=len(decoder.layers),
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            dim=first.head_dim,
            inner=config.intermediate_size,
            eps=config.rms_norm_eps,
            scale=first.scaling,
        )
        self._work = sum(p.numel() for layer in self._layers for p in layer.parameters())
        self._head: Any = model.lm_head
        self._scratch, self._logits = torch.empty(0), torch.empty(0)
        for _, tensor in model.named_weights():
            ask_for_huge_pages(tensor, now=True)
        self.begin_version()

    def begin_version(self) -> None:
        """Forget the tensors of the weights, which have changed: their addresses are looked up in every
        step."""
        self._tensors = [list(layer_tensors(layer)) for layer in self._layers]
        self._rotation = torch.empty(0), torch.empty(0)

    def hidden(self, sequences: Seq[Sequence], store: KVStore) -> Tensor:
        """Final hidden states of each sequence's first token that is not cached; its key and value go to its blocks in `store`. [B, H]"""
        assert self._model.adapter is None, "an adapter was put on the model after its decode step was compiled"
        tokens = np.array([s.tokens[s.num_cached_tokens] for s in sequences], dtype=np.int64)
        lengths = np.array([s.num_cached_tokens for s in sequences], dtype=np.int64)
        tables = block_tables(sequences, max(len(s.blocks) for s in sequences))
        shape, num = self._shape, len(tokens)
        pools = store.pools(shape.layers, shape.kv_heads, shape.dim)
        tensors = np.fromiter(self._pointers(pools), dtype=np.uint64, count=-1)
        cos, sin = self._rotated(torch.from_numpy(lengths))
        out = torch.empty(num, shape.hidden)
        threads = _threads(num * self._work)
        step = DecodeStep.from_buffer_copy(shape)
        step.num, step.threads, step.longest = num, threads, int(lengths.max()) + 1
        step.block_size, step.table_width = store.block_size, tables.shape[1]
        step.embed, step.final_norm = self._embed.weight.data_ptr(), self._final_norm.weight.data_ptr()
        step.tensors, step.tokens, step.lengths, step.tables = (x.ctypes.data for x in (tensors, tokens, lengths, tables))
        step.cos, step.sin, step.out = cos.data_ptr(), sin.data_ptr(), out.data_ptr()
        size = self._library.decode_scratch_floats(ctypes.byref(step))
        if len(self._scratch) < size:
            self._scratch = torch.empty(size + size // 2)
        step.scratch = self._scratch.data_ptr()
        self._library.decode_step(ctypes.byref(step))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [B, V] of states [B, H]; valid until the next ones are asked for."""
        hidden = hidden.contiguous()
        num, (vocab, width) = len(hidden), self._head.weight.shape
        if len(self._logits) < num * vocab:
            self._logits = torch.empty(num * vocab)
        out = self._logits[: num * vocab].view(num, vocab)
        bias = 0 if self._head.bias is None else self._head.bias.data_ptr()
        weight, threads = self._head.weight.data_ptr(), _threads(num * vocab * width)
        asked = Logits(num, width, vocab, threads, hidden.data_ptr(), weight, bias, out.data_ptr())
        self._library.decode_logits(ctypes.byref(asked))
        return out

    def _rotated(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotation at each position [B]; kept for the next steps unless they depend on what is computed together.
        [B, D], twice"""
        kind = self._rotary.rope_type
        if "dynamic" in kind or kind == "longrope":
            cos, sin = self._rotary(self._embed.weight, positions[None])
            return cos.contiguous(), sin.contiguous()
        if len(self._rotation[0]) <= (last := int(positions.max())):
            cos, sin = self._rotary(self._embed.weight, torch.arange(max(POSITIONS, 2 * last))[None])
            self._rotation = cos[0], sin[0]
        cos, sin = (table.index_select(0, positions) for table in self._rotation)
        return cos, sin

    def _pointers(self, pools: Iterable[tuple[Tensor, Tensor]]) -> Iterator[int]:
        """Addresses of every layer's tensors in the order of decode.c; 0: the layer has none such."""
        for tensors, (keys, values) in zip(self._tensors, pools, strict=True):
            for tensor in tensors:
                yield 0 if tensor is None else tensor.data_ptr()
            yield keys.data_ptr()
            yield values.data_ptr()


def _threads(work: int) -> int:
    """Number of torch's threads for `work` multiplications."""
    return min(torch.get_num_threads(), max(1, work // WORK_PER_THREAD))


def layer_tensors(layer: Any) -> Iterator[Tensor | None]:
    """A layer's tensors in the order of decode.c, without the cache's."""
    attention, mlp = layer.self_attn, layer.mlp
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    yield layer.input_layernorm.weight
    yield from (part.weight for part in parts)
    yield from (part.bias for part in parts)
    with_norms = hasattr(attention, "q_norm")
    yield attention.q_norm.weight if with_norms else None
    yield attention.k_norm.weight if with_norms else None
    yield attention.o_proj.weight
    yield attention.o_proj.bias
    yield layer.post_attention_layernorm.weight
    for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        yield part.weight
        yield part.bias


def unfit(model: CausalModel) -> str | None:
    """Why the compiled step does not know a model; None where it does."""
    config: Any = model.decoder.config
    if config.model_type not in FAMILIES:
        return f"it knows the architectures {', '.join(FAMILIES)}, and the model is {config.model_type}"
    if model.adapter is not None:
        return "it reads plain weights, and the model has an adapter"
    if model.dtype != torch.float32:
        return f"it computes in float32, and the model is in {str(model.dtype).removeprefix('torch.')}"
    if config.hidden_act != "silu":
        return f"it knows MLPs with silu, and the model's has {config.hidden_act}"
    layers: Any = model.decoder.layers
    for layer in layers:
        for part in layer.modules():
            if part._forward_hooks or part._forward_pre_hooks:
                return f"it does what the modules do by themselves, and the model's {type(part).__name__} has hooks"
        for part in (*layer.self_attn.children(), *layer.mlp.children()):
            if next(part.parameters(), None) is not None and type(part) is not nn.Linear and not hasattr(part, "variance_epsilon"):
                return f"it knows plain linear layers, and the model has {type(part).__name__}"
    decoder: Any = model.decoder
    if (fault := unfit_head(model)) is not None:
        return fault
    if not (plain(decoder.embed_tokens.weight) and plain(decoder.norm.weight)):
        return "it reads embeddings that lie in one piece in this process's memory"
    wanted = expected_sizes(config, layers[0].self_attn.head_dim)
    for layer in layers:
        for tensor, size in zip(layer_tensors(layer), wanted, strict=True):
            if tensor is not None and not (plain(tensor) and tensor.numel() == size):
                return "it reads whole tensors that lie in one piece in this process's memory"
    sizes = (config.hidden_size, config.intermediate_size, layers[0].self_attn.head_dim)
    vector = library().decode_vector_floats()
    if any(size % vector for size in sizes) or sizes[2] % 2:
        return f"it knows sizes that are multiples of {vector}, and the model's hidden, MLP and head sizes are {sizes}"
    return None


def unfit_head(model: CausalModel) -> str | None:
    """The same of what gives logits."""
    head: Any = model.lm_head
    if type(head) is not nn.Linear or head._forward_hooks or head._forward_pre_hooks or model.changes_logits:
        return "it knows an output layer that is a plain linear one, with nothing after it"
    tensors = [head.weight] if head.bias is None else [head.weight, head.bias]
    return None if all(map(plain, tensors)) else "it reads an output layer that lies in one piece in this process's memory"


def expected_sizes(config: Any, dim: int) -> list[int]:
    """Numbers in each of a layer's tensors, in the order of decode.c: where one of them is cut over processes it has fewer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    wide, narrow = config.num_attention_heads * dim, config.num_key_value_heads * dim
    projections = [wide * hidden, narrow * hidden, narrow * hidden, wide, narrow, narrow]
    return [hidden, *projections, dim, dim, hidden * wide, hidden, hidden, *[inner * hidden, inner] * 2, hidden * inner, hidden]


def plain(tensor: Tensor) -> bool:
    """True if the tensor's address describes it in full."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.is_contiguous() and tensor.dtype == torch.float32


@torch.inference_mode()
def checked(model: CausalModel) -> NativeDecode:
    """The compiled step of a model, after a comparison with the model's own modules.

    Raises:
        NotCompiled: if there is no such step, or its results differ; the text says why.
    """
    native, size = NativeDecode(model), 4
    store = KVStore(sum(-(-length // size) for length, _ in CHECKED), size)
    free = list(range(store.num_blocks))[::-1]
    sequences: list[Sequence] = []
    for number, (length, _) in enumerate(CHECKED):
        tokens = [(7 * place + 3 * number) % model.vocab_size for place in range(length)]
        blocks = [free.pop() for _ in range(-(-length // size))]
        sequences.append(Sequence(Request(f"check {number}", Ints(tokens), SamplingParams(max_tokens=1)), number, tokens, blocks=blocks))
    prefill = [
        PaddedPart([(s, s.num_pending_tokens - decoded)])
        for s, (_, decoded) in zip(sequences, CHECKED, strict=True)
        if s.num_pending_tokens > decoded
    ]
    step = lay_out(prefill, store, model.device)
    model.hidden(step.tokens, step.positions, step.attend)
    for part in prefill:
        for sequence, new in part.planned:
            sequence.num_cached_tokens += new
    row = PackedRow([len(s.tokens) for s in sequences], model.device)
    expected = model.hidden(torch.tensor([t for s in sequences for t in s.tokens]), row.positions, row)
    starts = np.cumsum([0] + [len(s.tokens) for s in sequences])
    found: list[Tensor] = []
    wanted: list[Tensor] = []
    while running := [(start, s) for start, s in zip(starts, sequences, strict=False) if s.num_pending_tokens]:
        found.append(native.hidden([s for _, s in running], store))
        wanted.append(expected[[int(start) + s.num_cached_tokens for start, s in running]])
        for _, s in running:
            s.num_cached_tokens += 1
    states = torch.cat(wanted)
    for what, mine, theirs in (("states", torch.cat(found), states), ("logits", native.logits(states), model.logits(states))):
        distance = float((mine - theirs).norm() / theirs.norm())
        if not distance <= TOLERANCE:
            raise NotCompiled(f"its {what} are {distance:.2g} away from those of the model's own modules")
    return native
