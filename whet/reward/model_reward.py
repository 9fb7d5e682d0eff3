"""The reward `model`: a reward model's score at the last token of the reply."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch

from whet.data.hub import resolve_model_path
from whet.data.template import Renderer, load_tokenizer
from whet.model.attention import PackedRow
from whet.model.causal import pick_device
from whet.model.config import ModelConfig
from whet.model.scalar import load_scalar
from whet.reward.base import RewardError, call_name
from whet.reward.model import ModelRewardOptions, Scorer
from whet.types import Finish, Message, Rewards, Trajectory
from whet.types.columns import Ints

KEY = "reward.options.path"


def model_config(options: ModelRewardOptions) -> ModelConfig:
    """Settings of the reward model as a `ModelConfig`."""
    return ModelConfig(path=options.path, dtype=options.dtype, device=options.device, trust_remote_code=options.trust_remote_code)


@dataclass(slots=True)
class WaitingScore:
    """Tokens that wait for their score."""

    tokens: tuple[int, ...]
    score: Future[float] = field(default_factory=Future[float])


class OneScorer:
    """A reward model that one process has whole."""

    def __init__(self, options: ModelRewardOptions) -> None:
        pick_device(options.device, "reward.options.device")
        self._model = load_scalar(resolve_model_path(options.path), model_config(options), trainable=False, key=KEY)
        self.max_positions = self._model.max_positions

    @torch.no_grad()
    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        lengths = [len(tokens) for tokens in sequences]
        row = PackedRow(lengths, self._model.device)
        flat = torch.tensor([token for tokens in sequences for token in tokens], device=self._model.device)
        hidden = self._model.hidden(flat, row.positions, row)
        ends = torch.tensor([end - 1 for end in accumulate(lengths)], device=self._model.device)
        return self._model.scores(hidden.index_select(0, ends)).tolist()


class ModelReward:
    """Scores trajectories with a reward model, on its own thread.

    Args:
        options: the model, and the form of its input.
        policy: folder of the model whose tokens the trajectories hold; None: unknown.
        scorer: the model; None: it is loaded here.

    Raises:
        ValueError: the folder holds no reward model, its vocabulary is not the policy's and `reads` is
            `tokens`, or the device does not exist.
    """

    def __init__(self, options: ModelRewardOptions, policy: Path | None, scorer: Scorer | None = None) -> None:
        self._options = options
        folder = resolve_model_path(options.path)
        tokenizer = load_tokenizer(folder, trust_remote_code=options.trust_remote_code)
        self._renderer = Renderer(tokenizer)
        alike = policy is not None and (
            load_tokenizer(policy, trust_remote_code=options.trust_remote_code).get_vocab() == tokenizer.get_vocab()
        )
        if options.reads == "tokens" and policy is not None and not alike:
            raise ValueError(
                f"reward.options.reads is tokens, but the vocabulary of {folder} is not the policy's ({policy}): its scores would be of "
                "other words; choose a reward model of the policy's family, or reads=messages for conversations of one turn"
            )
        self._reads_tokens = options.reads == "tokens" or (options.reads == "auto" and alike)
        self._scorer = scorer or OneScorer(options)
        self._thread = ThreadPoolExecutor(1, "whet-reward-model")
        self._queue: deque[WaitingScore] = deque()

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        name = call_name("model", trajectory.task)
        waiting = WaitingScore(self._tokens(trajectory, name))
        most = self._scorer.max_positions
        if most is not None and len(waiting.tokens) > most:
            many = f"{len(waiting.tokens)} tokens are more than the reward model's {most} positions"
            raise RewardError(f"{name}: {many}; lower rollout.max_tokens")
        self._queue.append(waiting)
        self._thread.submit(self._score_next)
        score = await asyncio.wrap_future(waiting.score)
        if not math.isfinite(score):
            raise RewardError(f"{name}: the reward model's score is {score}: its weights or its dtype ({self._options.dtype}) are at fault")
        return Rewards(score)

    def close(self) -> None:
        """Fail the waiting calls, and wait for the running one."""
        self._thread.shutdown(cancel_futures=True)
        while self._queue:
            waiting = self._queue.popleft()
            if waiting.score.set_running_or_notify_cancel():
                waiting.score.set_exception(RewardError("the reward model was closed before it had scored this"))

    def _tokens(self, trajectory: Trajectory, name: str) -> tuple[int, ...]:
        """The model's input, up to the last token that the policy sampled: the end of its turn, unless
        it was truncated."""
        turns = trajectory.turns
        if self._reads_tokens:
            first = max((i for i, turn in enumerate(turns) if turn.restart), default=0)
            tokens = tuple(Ints.join(part for turn in turns[first:] for part in (turn.context, turn.tokens)))
            if not tokens:
                raise RewardError(f"{name}: there are no tokens to score (reads=tokens); use reads=messages")
            return tokens
        if len(turns) != 1:
            raise RewardError(
                f"{name}: the reward model reads messages, for conversations of one turn, and there are {len(turns)} here; use a reward "
                "model with the policy's vocabulary and reads=tokens"
            )
        task, reply = trajectory.task, turns[0].message
        if isinstance(task.prompt, str):
            prompt = self._renderer.prompt(task)
            tokens = (*prompt, *self._renderer.plain(reply.content, prompt, inner=True), self._renderer.stop_token_ids[0])
        else:
            messages = task.prompt or (Message("user", ""),)
            tokens, _ = self._renderer.supervised((*messages, reply), task.tools, first_trained=len(messages))
        return tokens[:-1] if turns[0].finish is not Finish.STOP else tokens

    def _score_next(self) -> None:
        """Score what waits, as far as it fits; runs on the thread, at least once for each that was put there."""
        batch = list(self._take())
        if not batch:
            return
        try:
            for waiting, score in zip(batch, self._scorer.scores([waiting.tokens for waiting in batch]), strict=True):
                waiting.score.set_result(score)
        except Exception as error:  # to be raised where it is waited for
            failure = RewardError(f"the reward model failed on {len(batch)} conversations: {type(error).__name__}: {error}")
            for waiting in batch:
                if not waiting.score.done():
                    waiting.score.set_exception(failure)

    def _take(self) -> Iterator[WaitingScore]:
        room = self._options.batch_tokens
        alone = torch.are_deterministic_algorithms_enabled()  # the bits of a score depend on the shape of the row that it is computed in
        first = True
        while self._queue and (first or (not alone and len(self._queue[0].tokens) <= room)):
            waiting = self._queue.popleft()
            if waiting.score.set_running_or_notify_cancel():
                first = False
                room -= len(waiting.tokens)
                yield waiting
