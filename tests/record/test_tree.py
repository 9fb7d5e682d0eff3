"""Whatever a program asks: a call goes on from recorded tokens or begins a sample of its own, and every sampled token trains once."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes import FakeEngine
from tests.rollout.scripted import RENDERER, STOP, TASK, run
from whet.env.limits import Limits
from whet.env.rollout import TrajectoryRun
from whet.record.play import _Calls, _service
from whet.record.server import Recorder
from whet.record.session import Session
from whet.record.tree import Rule
from whet.rollout.samples import samples_of
from whet.serve.openai_chat import prepare_chat
from whet.types import Finish, Outcome, SamplingParams, Trajectory

WORDS = ["12", "36", "The answer is 36.", '<tool_call>\n{"name": "f", "arguments": {"a": "12"}}\n</tool_call>', "12 <tool_call> 3"]


@dataclass(frozen=True)
class Action:
    """What the program does next: goes on from an earlier call's conversation, edits it, or begins another one."""

    kind: str
    which: int
    say: str
    reply: str
    num: int


ACTIONS = st.builds(
    Action,
    st.sampled_from(["extend", "extend", "extend", "again", "edit", "new", "forced"]),
    st.integers(0, 10),
    st.sampled_from(["12", "36", "3", "is"]),
    st.sampled_from(WORDS),
    st.sampled_from([1, 1, 1, 2]),
)


def follow(message, say):
    """A message behind a reply: what its tools answer, or a user's."""
    calls = message.get("tool_calls") or []
    return [{"role": "tool", "tool_call_id": call["id"], "content": say} for call in calls] or [{"role": "user", "content": say}]


async def played(actions):
    replies = iter([action.reply for action in actions for _ in range(action.num)])
    engine = FakeEngine(lambda request: [*((t, -0.01 * (t + 1)) for t in (*RENDERER.encode(next(replies)), STOP)), Finish.STOP])
    made = TrajectoryRun("t/0", TASK, engine, RENDERER, SamplingParams(99, stop_token_ids=(STOP,)), Limits(999, 9999, 200))
    session = Session(RENDERER, _Calls(made).stream)
    with ThreadPoolExecutor(1) as texts:
        session.service = _service(made, session, Recorder("", texts))
        ended = []
        for action in actions:
            at = ended[action.which % len(ended)] if ended else None
            if at is None or action.kind == "new":
                messages = [{"role": "system", "content": action.say}, {"role": "user", "content": action.say}]
            elif action.kind == "again":
                messages = at[0]
            elif action.kind == "edit":
                messages = [*at[0][:-1], {"role": "user", "content": f"{action.say} 12"}]
            else:
                messages = [*at[0], at[1], *follow(at[1], action.say)]
            body = {"messages": messages, "n": action.num, **({"logit_bias": {"5": 1}} if action.kind == "forced" else {})}
            answer = await session.answer("/v1/chat/completions", prepare_chat, body, again=False)
            ended += [(messages, choice["message"]) for choice in answer.whole["choices"]]
        await session.close()
    return session, engine


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ACTIONS, min_size=1, max_size=9))
def test_every_call_has_a_named_place_and_every_sampled_token_trains_once(actions):
    session, engine = run(played(actions))
    calls = session.tree.calls
    assert [tuple(call.spec.prompt) for call in calls] == [tuple(request.tokens) for request in engine.requests]
    for call in calls:
        parent = call.spec.parent
        if call.spec.rule in (Rule.EXTENDS, Rule.BRANCH) and parent is not None:
            assert tuple(call.spec.prompt)[: len(parent.whole)] == tuple(parent.whole)
        assert (call.spec.rule is Rule.FIRST) == (call.number == 0)
        assert call.continues <= (call.spec.rule is Rule.EXTENDS)
    samples = samples_of(Trajectory("t/0", TASK, tuple(session.turns()), Outcome.COMPLETED))
    trained = [(sample.order, place) for sample in samples for place, mask in enumerate(sample.loss_mask) if mask]
    assert len(trained) == sum(len(call.reply.tokens) for call in calls if call.spec.trained)
    found = []
    for sample in samples:
        tokens, mask = tuple(sample.tokens), tuple(sample.loss_mask)
        ends = [place for place in range(len(mask)) if mask[place] and (place + 1 == len(mask) or not mask[place + 1])]
        for end in ends:
            begin = max((place + 1 for place in range(end) if not mask[place]), default=0)
            found.append((tokens[:begin], tokens[begin : end + 1]))
    assert sorted(found) == sorted((tuple(call.spec.prompt), tuple(call.reply.tokens.column())) for call in calls if call.spec.trained)


def test_parallel_requests_of_one_prompt_are_told_apart():
    async def main():
        engine = FakeEngine(lambda request: [*((t, -0.5) for t in (*RENDERER.encode("12"), STOP)), Finish.STOP])
        made = TrajectoryRun("t/0", TASK, engine, RENDERER, SamplingParams(99, stop_token_ids=(STOP,)), Limits(999, 9999, 200))
        session = Session(RENDERER, _Calls(made).stream)
        with ThreadPoolExecutor(1) as texts:
            session.service = _service(made, session, Recorder("", texts))
            body = {"messages": [{"role": "user", "content": "3"}]}
            await asyncio.gather(*(session.answer("/v1/chat/completions", prepare_chat, body, again=False) for _ in range(5)))
            await session.close()
        return session

    session = run(main())
    assert [call.spec.rule for call in session.tree.calls] == [Rule.FIRST, *[Rule.BRANCH] * 4]
    assert len(samples_of(Trajectory("t/0", TASK, tuple(session.turns()), Outcome.COMPLETED))) == 5
