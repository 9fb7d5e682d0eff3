"""A spy on what the engine samples and what the backend trains on."""

from collections import Counter

import pytest

from whet.engine.embedded.engine import EmbeddedEngine
from whet.train.torch_native.backend import TorchBackend
from whet.types import Origin


class Spy:
    """What the engine handed out and what the backend trained on, seen from outside."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sampled: Counter[tuple[int, ...]] = Counter()
        self.trained: Counter[tuple[int, ...]] = Counter()
        self.environment_tokens = 0
        self.steps = 0
        generate, forward_backward = EmbeddedEngine.generate, TorchBackend.forward_backward

        async def spied_generate(engine, request):
            tokens: list[int] = []
            async for chunk in generate(engine, request):
                tokens.extend(chunk.tokens)
                if chunk.finish is not None and request.sampling.temperature > 0:  # evaluations are greedy
                    self.sampled[tuple(tokens)] += 1
                yield chunk

        def spied_forward_backward(backend, batch, loss, **options):
            if loss.__name__ != "sft_loss":
                self.see(batch)
            return forward_backward(backend, batch, loss, **options)

        monkeypatch.setattr(EmbeddedEngine, "generate", spied_generate)
        monkeypatch.setattr(TorchBackend, "forward_backward", spied_forward_backward)

    def see(self, batch) -> None:
        self.steps += 1
        assert not batch.loss_mask[batch.origin != Origin.MODEL].any(), "a token that was not sampled is trained"
        self.environment_tokens += int((batch.origin == Origin.ENVIRONMENT).sum())
        for tokens, mask in zip(batch.tokens.split(batch.lengths.tolist()), batch.loss_mask.split(batch.lengths.tolist()), strict=True):
            run: list[int] = []
            for token, trained in zip([*tokens.tolist(), None], [*mask.tolist(), False], strict=True):
                if trained:
                    run.append(token)
                elif run:
                    self.trained[tuple(run)] += 1
                    run = []
