"""The embedded engine without its event loop: one `step` plans, computes and samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from whet.engine.base import EngineFailed, EngineRefused
from whet.engine.embedded.cache import BlockPool, KVStore
from whet.engine.embedded.compiled.library import NotCompiled
from whet.engine.embedded.compiled.native import NativeDecode, checked
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.grammar import Matching
from whet.engine.embedded.lockstep import Lockstep, SingleProcess
from whet.engine.embedded.logits import Drawn, Top, adjusted, most_likely, raw_of
from whet.engine.embedded.own_memory import OwnMemory
from whet.engine.embedded.paged import PlannedTokens, buckets, lay_out
from whet.engine.embedded.room import with_cache
from whet.engine.embedded.routing import KEY, StepRoutes
from whet.engine.embedded.rows import DecodeRows
from whet.engine.embedded.sampler import sample
from whet.engine.embedded.scheduler import Scheduler, Sequence
from whet.engine.embedded.static import StaticDecode
from whet.engine.embedded.stops import finish_of
from whet.engine.embedded.tokenizer import EngineTokenizer
from whet.model.causal import CausalModel, release_unused
from whet.model.routing import Routers
from whet.types import Finish, Request, SamplingParams, Scored
from whet.types.columns import Doubles, Ints

SCORE_DECODED = 5
"""Tokens of a score that go through decoding, so that it tells of that path, too."""
NO_TOKENIZER = EngineTokenizer()


@dataclass(frozen=True, slots=True)
class Progressed:
    """A sequence that got a token in a step, and whether that was its last."""

    sequence: Sequence
    finish: Finish | None
    failure: EngineRefused | EngineFailed | None = None
    """Why it cannot go on, though the others can."""


class EngineCore:
    """Continuous batching over a paged cache.

    Args:
        model: model whose parameters it reads; they may be the trainer's own.
        config: sizes, and the way to decode.
        tokenizer: finds stop texts and reads grammars.
        ranks: the processes that compute its steps with it; None: it computes alone.
    """

    def __init__(
        self, model: CausalModel, config: EmbeddedConfig, tokenizer: EngineTokenizer = NO_TOKENIZER, ranks: Lockstep | None = None
    ) -> None:
        config = with_cache(config, model)
        assert config.cache_tokens is not None
        block_size = config.block_size
        num_blocks = -(-config.cache_tokens // block_size)
        self.model = model
        self._config, self._tokenizer = config, tokenizer
        self.version = 0
        self.num_computed = 0
        """Tokens that went through the model in steps; what the cache saved is not among them."""
        self.store = KVStore(num_blocks, block_size)
        pool = BlockPool(num_blocks, block_size)
        self.rows = DecodeRows(self.store, pool)
        self.scheduler = Scheduler(pool, self._copy_block, config.max_running, config.max_batch_tokens)
        self.routes: StepRoutes | None = None
        """Experts of the cached tokens; None: nobody has asked for any yet."""
        self.max_tokens = min(num_blocks * block_size, model.max_positions or num_blocks * block_size)
        """Longest sequence, prompt and reply together."""
        self.ranks = ranks or SingleProcess()
        """The ranks that compute together; they hear of every change to the core before it is made."""
        self._arrivals = 0
        self._may_compile = config.compiled and not config.static_decode and ranks is None  # it reads whole tensors
        self._native: NativeDecode | None = None
        self._static = StaticDecode(model, self.store) if config.static_decode else None
        self._resting: OwnMemory | None = None
        """Memory of the weights while they are freed."""

    def check(self, name: str, tokens: Ints, num_more: int) -> None:
        """Refuse what could never run.

        Raises:
            EngineRefused: naming the request `name`, and why `tokens` and `num_more` sampled ones cannot run.
        """
        if not tokens:
            raise EngineRefused(f"request {name} has no tokens to continue")
        longest = len(tokens) + num_more
        if longest > self.max_tokens:
            asked = f"request {name}: {len(tokens)} prompt tokens + max_tokens {num_more} = {longest}"
            if self.max_tokens == self.model.rotary_limit:
                why = "beyond it the model's rotary scaling depends on the longest sequence of a step): lower the token limits"
            else:
                why = "the model's positions or the cache): lower the token limits or raise engine.embedded.cache_tokens"
            raise EngineRefused(f"{asked}, over the limit of {self.max_tokens} ({why}")
        if min(tokens) < 0 or max(tokens) >= self.model.vocab_size:
            raise EngineRefused(
                f"request {name} has token ids from {min(tokens)} to {max(tokens)}, but the model knows 0 to "
                f"{self.model.vocab_size - 1}: was it made with another tokenizer?"
            )

    def check_sampling(self, request: Request) -> None:
        """Refuse sampling that this model or engine cannot do.

        Raises:
            EngineRefused: naming the request and the option.
        """
        sampling = request.sampling
        named = {"logit_bias": [token for token, _ in sampling.logit_bias], "stop_token_ids": sampling.stop_token_ids}
        for option, ids in named.items():
            if unknown := [token for token in ids if not 0 <= token < self.model.vocab_size]:
                raise EngineRefused(
                    f"request {request.id}: {option} names token {unknown[0]}, but the model knows 0 to {self.model.vocab_size - 1}"
                )
        if sampling.min_tokens and len(set(sampling.stop_token_ids)) == self.model.vocab_size:
            raise EngineRefused(f"request {request.id}: with min_tokens, stop_token_ids must leave a token that can be sampled")
        if sampling.routes:
            self._check_routes(request.id)
        if sampling.stop and self._tokenizer.decode is None:
            raise EngineRefused(f"request {request.id} has stop texts, but the engine was made without a tokenizer to find them with")

    def _check_routes(self, name: str) -> None:
        if self._static is not None:
            raise EngineRefused(f"request {name}: with engine.embedded.static_decode the engine does not tell experts; leave that out")
        if self.routes is None:
            try:
                Routers(self.model.hf, KEY)
            except ValueError as error:
                raise EngineRefused(f"request {name}: {error}") from error

    def begin_grammar(self, request: Request) -> Matching | None:
        """State of the request's reply in its grammar; None: it has none. From any thread: it may take
        seconds.

        Raises:
            EngineRefused: naming the request, if the grammar cannot be used.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        if self._tokenizer.grammars is None:
            raise EngineRefused(f"request {request.id} has a grammar, but the engine was made without a tokenizer to read it with")
        try:
            matching = self._tokenizer.grammars.begin(grammar, request.sampling.stop_token_ids)
        except ValueError as error:
            raise EngineRefused(f"request {request.id}: {error}") from error
        for token in request.tokens[len(request.tokens) - request.num_begun :]:
            matching.take(token)
        return matching

    def add(self, request: Request, matching: Matching | None = None) -> Sequence:
        """Queue a request that passed `check` and `check_sampling`, with what `begin_grammar` said of it."""
        if request.sampling.routes and self.routes is None:
            self.drop_caches()  # of what it holds nobody knows the experts
            self.routes = StepRoutes(self.model, self.store.num_blocks * self.store.block_size, self.store.block_size)
        self.ranks.broadcast("add", request)
        sequence = Sequence(request, self._arrivals, list(request.tokens), matching=matching)
        self.scheduler.add(sequence)
        self._arrivals += 1
        return sequence

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in the cache, those side by side for decoding counted again."""
        return self.scheduler.num_cached_tokens + self.rows.num_tokens

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    @torch.inference_mode()
    def step(self) -> list[Progressed]:
        """Plan, compute, sample; returns what got a token.

        Raises:
            ValueError: if the model gives logits that are not finite.
            StaleCache: if a sequence holds a block that older weights filled; nothing is sampled then.
        """
        self.ranks.broadcast("step")
        planned = self.scheduler.plan()
        assert planned, "the engine has work but could not plan any of it"
        plan, hidden = self._forward(planned)
        for sequence, new in plan:
            self.scheduler.advance(sequence, new)
        ready = [i for i, (sequence, _) in enumerate(plan) if sequence.num_pending_tokens == 0]
        if not ready:
            return []
        ends = np.cumsum([new for _, new in plan]) - 1
        logits = self._logits(hidden[torch.from_numpy(ends[ready]).to(hidden.device)])
        sequences = [plan[i][0] for i in ready]
        drawn = self.ranks.drawn(lambda: draw(logits, sequences, compiled=self._native is not None))
        return [self._append(*item) for item in zip(sequences, drawn, strict=True)]

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out; with the last one the rows for decoding give their memory back."""
        self.ranks.broadcast("finish", sequence.arrival)
        self.scheduler.finish(sequence)
        if not self.scheduler.running:
            self.rows.clear()

    def drop_caches(self) -> None:
        """Forget every cached token; running sequences compute theirs again."""
        self.ranks.broadcast("drop_caches")
        self.scheduler.drop_caches()
        self.rows.clear()

    def begin_version(self, version: int) -> None:
        """The weights are those of `version` now: forget what older ones cached; running sequences compute it again."""
        self.ranks.broadcast("begin_version", version)
        self.drop_caches()
        self.scheduler.pool.begin_epoch()
        if self._static is not None:
            self._static.begin_version()
        if self._native is not None:
            self._native.begin_version()
        self.version = version

    def forget(self) -> None:
        """Drop the caches and free their memory."""
        self.ranks.broadcast("forget")
        self.drop_caches()
        self.store.clear()
        if self._static is not None:
            self._static.forget()

    def sleep(self, weights: bool) -> None:
        """Free the memory of the caches and, if asked, that of the weights, which are then lost. Nothing may be computed until `wake`."""
        self.ranks.broadcast("sleep", weights)
        self.forget()
        if weights and self._resting is None:
            if self._native is not None:  # it is made again on the weights' new device
                self._native, self._may_compile = None, True
            self._resting = OwnMemory(tensor for _, tensor in self.model.named_weights())
        release_unused()

    def wake(self) -> None:
        """Allocate the weight memory again. Its contents are undefined until new weights are copied into it."""
        self.ranks.broadcast("wake")
        if self._resting is not None:
            self._resting.allocate()
            self._resting = None

    @torch.inference_mode()
    def score(self, tokens: Ints, temperature: float, top_logprobs: int = 0) -> Scored:
        """`Engine.score`: all but the last few tokens are prefilled, those go through decoding one token at a time."""
        self.ranks.broadcast("score", tokens, temperature, top_logprobs)
        given = tokens[:-1]
        probe = Sequence(Request("score", given, SamplingParams(max_tokens=1)), 0, list(given))
        probe.blocks = self.scheduler.allocate(len(given))
        prefill = len(given) - min(len(given) // 2, SCORE_DECODED)
        logprobs: list[float] = []
        tops: list[Top] = []
        try:
            while probe.num_pending_tokens:
                new = min(prefill - probe.num_cached_tokens, self._config.max_batch_tokens) if probe.num_cached_tokens < prefill else 1
                _, hidden = self._forward([(probe, new)])
                targets = torch.tensor(tokens[probe.num_cached_tokens + 1 : probe.num_cached_tokens + new + 1], device=hidden.device)
                for states, wanted in zip(hidden.split(self._config.max_running), targets.split(self._config.max_running), strict=True):
                    logits = self._logits(states)
                    table = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, -1)
                    logprobs.extend(table.gather(-1, wanted[:, None]).squeeze(-1).tolist())
                    tops.extend(most_likely(table, top_logprobs) if top_logprobs else ())
                probe.num_cached_tokens += new
        finally:
            self.scheduler.free(probe.blocks)
            if not self.scheduler.running:
                self.rows.clear()
        return Scored(Doubles(logprobs), tuple(tops))

    def _append(self, sequence: Sequence, drawn: Drawn) -> Progressed:
        sequence.tokens.append(drawn.token)
        sequence.logprobs.append(drawn.logprob)
        sequence.versions.append(self.version)
        if sequence.request.sampling.nucleus:
            sequence.nucleus.append(drawn.nucleus)
        if drawn.raw is not None:
            sequence.raw_logprobs.append(drawn.raw.logprob)
            sequence.top_logprobs.append(drawn.raw.top)
        if drawn.failure is not None:
            return Progressed(sequence, None, EngineFailed(f"request {sequence.request.id}: {drawn.failure}"))
        try:
            return self._looked_at(sequence, drawn.token)
        except Exception as error:  # a grammar's or tokenizer's code over what one request asked for: the others have their tokens
            return Progressed(sequence, None, EngineFailed(f"request {sequence.request.id}: {type(error).__name__}: {error}"))

    def _looked_at(self, sequence: Sequence, token: int) -> Progressed:
        """Progress of a sequence after its newest token: it continues, ends or fails."""
        if sequence.matching is not None:
            sequence.matching.take(token)
            if (failure := sequence.matching.failure) is not None:
                why = f"request {sequence.request.id}: its grammar cannot be followed any further: {failure}"
                return Progressed(sequence, None, EngineRefused(why))
        return Progressed(sequence, finish_of(sequence, self._tokenizer.decode))

    def _forward(self, plan: Seq[PlannedTokens]) -> tuple[list[PlannedTokens], Tensor]:
        """The plan in the order in which it is computed, and the hidden states of its tokens. [T, H]"""
        self.scheduler.pool.check_fresh(block for sequence, _ in plan for block in sequence.blocks)
        self.num_computed += sum(new for _, new in plan)
        decode = self._decode_step()
        single = [] if decode is None else [item for item in plan if item[1] == 1]
        rest = plan if decode is None else [item for item in plan if item[1] > 1]
        outs: list[Tensor] = []
        if decode is not None and single:
            outs.append(decode([sequence for sequence, _ in single]))
        if rest:
            parts = buckets(rest, self.rows)
            rest = list(chain.from_iterable(part.planned for part in parts))
            step = lay_out(parts, self.store, self.model.device)
            compute = partial(self.model.hidden, step.tokens, step.positions, step.attend)
            outs.append(compute() if self.routes is None else self.routes.computed(rest, compute))
        return [*single, *rest], outs[0] if len(outs) == 1 else torch.cat(outs)

    def _copy_block(self, source: int, target: int) -> None:
        self.store.copy_block(source, target)
        if self.routes is not None:
            self.routes.copy_block(source, target)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits of states [B, H]; the compiled ones are valid until the next call. [B, V]"""
        native = self._compiled_step()
        return self.model.logits(hidden) if native is None else native.logits(hidden)

    def _decode_step(self) -> Callable[[Seq[Sequence]], Tensor] | None:
        """The function that computes decoding sequences by themselves; None: they are computed as all
        others."""
        if self._static is not None:
            return self._static.hidden
        native = self._compiled_step()
        return None if native is None else lambda sequences: native.hidden(sequences, self.store)

    def _compiled_step(self) -> NativeDecode | None:
        """The compiled decode step; None: torch decodes. It is made on first use: by then the model has
        its weights."""
        if self._may_compile and self.model.device.type == "cpu":
            self._may_compile = False
            try:
                self._native = checked(self.model)
            except NotCompiled as error:
                _tell(str(error))
        return self._native


@cache
def _tell(reason: str) -> None:
    """Once for each reason."""
    warnings.warn(f"the engine decodes with torch, not with its compiled step: {reason}", stacklevel=2)


def draw(logits: Tensor, sequences: list[Sequence], *, compiled: bool) -> list[Drawn]:
    """A token for each sequence from its row of logits [B, V]; in compiled code if possible. A row that
    nothing can be drawn from fails its own sequence.

    Raises:
        ValueError: nothing can be drawn from any row.
    """
    wanted = adjusted(logits, sequences)
    try:
        return _draw_rows(logits, wanted, sequences, compiled=compiled)
    except ValueError as error:
        best = wanted.max(dim=-1).values  # NaN, if there is one
        able = best.isfinite().nonzero().squeeze(-1).tolist()
        if not able or len(able) == len(sequences):
            raise
        found = iter(_draw_rows(logits[able], wanted[able], [sequences[i] for i in able], compiled=compiled))
        failed = Drawn(0, 0.0, b"", None, str(error))
        return [next(found) if i in set(able) else failed for i in range(len(sequences))]


def _draw_rows(logits: Tensor, wanted: Tensor, sequences: list[Sequence], *, compiled: bool) -> list[Drawn]:
    """Draw a token for each sequence.

    Args:
        logits: as the model gave them. [B, V]
        wanted: adjusted logits, to draw from. [B, V]
    """
    params, positions = [s.request.sampling for s in sequences], [len(s.tokens) for s in sequences]
    tokens, logprobs, kept = sample(wanted, params, positions, compiled=compiled)
    found = zip(tokens, logprobs, kept, raw_of(logits, sequences, tokens), strict=True)
    return [Drawn(*each) for each in found]
