"""A spy on what the engine samples and what the backend trains on."""

from collections import Counter

import pytest

from whet.engine.embedded.engine import EmbeddedEngine
from whet.train.learners import Learners
from whet.train.torch_native.backend import TorchBackend
from whet.types import Origin


class Spy:
    """What the engine handed out and what the backend trained on, seen from outside."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sampled: Counter[tuple[int, ...]] = Counter()
        self.given: Counter[tuple[int, ...]] = Counter()
        """Trained turns of the rollouts that updates were given."""
        self.flat: Counter[tuple[int, ...]] = Counter()
        """Those of samples without an advantage."""
        self.trained: Counter[tuple[int, ...]] = Counter()
        """Those that forward and backward passes were given."""
        self.environment_tokens = 0
        self.steps = 0
        generate, update, forward_backward = EmbeddedEngine.generate, Learners.update, TorchBackend.forward_backward

        async def spied_generate(engine, request):
            tokens: list[int] = []
            async for chunk in generate(engine, request):
                tokens.extend(chunk.tokens)
                if chunk.finish is not None and request.sampling.temperature > 0:  # evaluations are greedy
                    self.sampled[tuple(tokens)] += 1
                yield chunk

        def spied_update(learners, batch, progress, **options):
            self.see(batch)
            return update(learners, batch, progress, **options)

        def spied_forward_backward(backend, batch, loss, **options):
            if loss.__name__ != "sft_loss":
                for turns, _ in turns_of(batch):
                    self.trained.update(turns)
            return forward_backward(backend, batch, loss, **options)

        monkeypatch.setattr(EmbeddedEngine, "generate", spied_generate)
        monkeypatch.setattr(Learners, "update", spied_update)
        monkeypatch.setattr(TorchBackend, "forward_backward", spied_forward_backward)

    def see(self, batch) -> None:
        self.steps += 1
        assert not batch.loss_mask[batch.origin != Origin.MODEL].any(), "a token that was not sampled is trained"
        self.environment_tokens += int((batch.origin == Origin.ENVIRONMENT).sum())
        for turns, flat in turns_of(batch):
            self.given.update(turns)
            if flat:
                self.flat.update(turns)

    def check(self) -> None:
        """Every sampled turn was given to an update, and all of them but those without an advantage were computed."""
        assert self.given == self.sampled
        assert self.trained <= self.given
        assert self.given - self.trained <= self.flat


def turns_of(batch):
    """Runs of trained tokens of each sample, and whether its advantages are all 0."""
    pieces = (column.split(batch.lengths.tolist()) for column in (batch.tokens, batch.loss_mask, batch.advantages))
    for tokens, mask, advantages in zip(*pieces, strict=True):
        run: list[int] = []
        turns = []
        for token, trained in zip([*tokens.tolist(), None], [*mask.tolist(), False], strict=True):
            if trained:
                run.append(token)
            elif run:
                turns.append(tuple(run))
                run = []
        yield turns, not bool(advantages.any())
