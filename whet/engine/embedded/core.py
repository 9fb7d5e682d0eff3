"""The embedded engine without its event loop: one `step` plans, computes and samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whet.engine.embedded.cache import BlockPool, KVStore, PagedAttend, rows_of
from whet.engine.embedded.sampler import sample
from whet.engine.embedded.scheduler import Scheduler, Sequence
from whet.model.causal import CausalModel
from whet.types import Finish, Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Progressed:
    """A sequence that got a token in a step, and whether that was its last."""

    sequence: Sequence
    finish: Finish | None


class EngineCore:
    """Continuous batching over a paged cache.

    Args:
        model: whose parameters it reads; they may be the trainer's own.
        cache_tokens: tokens the cache holds, in all.
        block_size: tokens per block.
        max_running: sequences that run at a time.
        max_batch_tokens: tokens that a step computes at most.
    """

    def __init__(
        self, model: CausalModel, *, cache_tokens: int, block_size: int, max_running: int, max_batch_tokens: int
    ) -> None:
        num_blocks = -(-cache_tokens // block_size)
        self.model = model
        self.version = 0
        self.store = KVStore(num_blocks, block_size)
        self.scheduler = Scheduler(
            BlockPool(num_blocks, block_size), self.store.copy_block, max_running, max_batch_tokens
        )
        self._arrivals = 0

    def add(self, request: Request) -> Sequence:
        """Queue a request.

        Raises:
            EngineRefused: if it could never run.
        """
        sequence = Sequence(request, self._arrivals, list(request.tokens))
        self.scheduler.add(sequence)
        self._arrivals += 1
        return sequence

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    @torch.inference_mode()
    def step(self) -> list[Progressed]:
        """Plan, compute, sample; returns what got a token."""
        plan = self.scheduler.plan()
        assert plan, "the engine has work but could not plan any of it"
        plan.sort(key=lambda item: item[1] > 1)  # decoding sequences first: stable, so otherwise in queue order
        hidden = self._forward(plan)
        ends = torch.tensor([new for _, new in plan]).cumsum(0) - 1
        for sequence, new in plan:
            self.scheduler.advance(sequence, new)
        ready = [i for i, (sequence, _) in enumerate(plan) if sequence.pending == 0]
        if not ready:
            return []
        logits = self.model.logits(hidden[ends[ready].to(hidden.device)])
        sequences = [plan[i][0] for i in ready]
        tokens, logprobs = sample(
            logits, [s.request.sampling for s in sequences], [len(s.tokens) for s in sequences]
        )
        return [self._append(*item) for item in zip(sequences, tokens, logprobs, strict=True)]

    def drop_caches(self) -> None:
        self.scheduler.drop_caches()

    @torch.inference_mode()
    def score(self, tokens: tuple[int, ...], temperature: float) -> list[float]:
        """Log-probs of tokens[1:]: the first half is prefilled, the rest goes through decoding one token at a time."""
        pool, size = self.scheduler.pool, self.scheduler.pool.block_size
        probe = Sequence(Request("score", tokens, SamplingParams(max_tokens=1)), 0, list(tokens))
        try:
            while len(probe.blocks) * size < len(tokens):
                probe.blocks.append(pool.allocate())
            out: list[float] = []
            while probe.pending:
                new = max(len(tokens) // 2, 1) if probe.cached == 0 else 1
                logits = self.model.logits(self._forward([(probe, new)])).float() / temperature
                targets = torch.tensor(tokens[probe.cached + 1 : probe.cached + new + 1], device=logits.device)
                logprobs = torch.log_softmax(logits, -1)[: len(targets)].gather(-1, targets[:, None])
                out.extend(logprobs.squeeze(-1).tolist())
                probe.cached += new
            return out
        finally:
            for block in probe.blocks:
                pool.drop(block)

    def _append(self, sequence: Sequence, token: int, logprob: float) -> Progressed:
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        sequence.versions.append(self.version)
        sampling = sequence.request.sampling
        finish = None
        if token in sampling.stop_token_ids:
            finish = Finish.STOP
        elif sequence.num_sampled >= sampling.max_tokens:
            finish = Finish.LENGTH
        return Progressed(sequence, finish)

    def _forward(self, plan: list[tuple[Sequence, int]]) -> Tensor:
        """Hidden states of the planned tokens, in the plan's order. [T, H]"""
        device, size = self.model.device, self.store.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence, new in plan:
            first = sequence.cached
            tokens.extend(sequence.tokens[first : first + new])
            positions.extend(range(first, first + new))
            slots.extend(sequence.blocks[p // size] * size + p % size for p in range(first, first + new))
        num_decode = sum(new == 1 for _, new in plan)
        parts = [(plan[:num_decode], 0), (plan[num_decode:], num_decode)]
        decode, prefill = (
            rows_of([s.blocks for s, _ in part], [s.cached for s, _ in part], [n for _, n in part], first, size, device)
            if part
            else None
            for part, first in parts
        )
        attend = PagedAttend(self.store, torch.tensor(slots, device=device), num_decode, decode, prefill)
        return self.model.hidden(
            torch.tensor(tokens, device=device), torch.tensor(positions, device=device), attend
        )
