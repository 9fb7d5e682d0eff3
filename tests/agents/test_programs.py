"""Programs of others play trajectories unchanged: every token that the model sampled for them trains once, none is tokenised again
(`make test-agents`)."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from tests.agents.environments import python_of
from tests.agents.programs import AGENTS, CHAT, IMPATIENT, MESSAGES, MINI, RESPONSES
from tests.fakes import FakeEngine
from tests.rollout.scripted import RENDERER, STOP, run
from whet.env.build import EnvConfig, build_env_factory
from whet.env.limits import Limits
from whet.env.resources import Resources
from whet.env.rollout import TrajectoryRun
from whet.rollout.samples import samples_of
from whet.types import Finish, Message, Outcome, SamplingParams, Task

pytestmark = pytest.mark.agents
TASK = Task("t", (Message("user", "12*3?"),), "36")
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*3"}}\n</tool_call>'
TWO = f"{CALL}\n{CALL}"

def played(environment, program, replies, *, stream=False, pace_s=0.0):
    """The trajectory of a program and its samples. `replies`: texts, one for each request; or the text for a prompt."""
    engine = FakeEngine(pace_s=pace_s)

    def script(request):
        text = replies(RENDERER.decode(request.tokens)) if callable(replies) else replies.pop(0)
        tokens = (*RENDERER.encode(text), STOP)
        assert RENDERER.decode(tokens[:-1]) == text
        return [*((token, -0.01 * (token + 1)) for token in tokens), Finish.STOP]

    engine.script = script
    options = {"command": [python_of(environment), "-c", program.replace("STREAM", str(stream))]}
    make = build_env_factory(EnvConfig(name="program", options=options))
    sampling, limits = SamplingParams(999, stop_token_ids=(STOP,), seed=7), Limits(40, 4000, 400)

    async def main():
        async with aclosing(Resources()) as resources:
            own = resources.of_group(TASK).of_trajectory()

            async def open_env():
                return make(**await own.open(make.needs))

            return await TrajectoryRun("t/0", TASK, engine, RENDERER, sampling, limits).to_end(open_env)

    trajectory = run(main())
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    samples = samples_of(trajectory)
    trained = sorted(token for sample in samples for token, trains in zip(sample.tokens, sample.loss_mask, strict=True) if trains)
    assert trained == sorted(token for _, chunk in engine.chunks for token in chunk.tokens)
    prompts = {tuple(request.tokens) for request in engine.requests}
    for sample in samples:
        mask, tokens = tuple(sample.loss_mask), tuple(sample.tokens)
        for place in range(1, len(mask)):
            assert not mask[place] or mask[place - 1] or tokens[:place] in prompts, "what comes before a reply is its prompt, id by id"
    return trajectory, samples


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("program", [CHAT, RESPONSES, MESSAGES], ids=["openai", "responses", "anthropic"])
def test_a_client_with_tools_is_one_sample(program, stream):
    trajectory, samples = played("clients", program, [TWO, CALL, "The answer is 36."], stream=stream)
    assert len(samples) == 1 and trajectory.counts["calls_extends"] == 2
    assert trajectory.turns[-1].notes[-1].attachments["stdout"] == "The answer is 36.\n"


@pytest.mark.parametrize("responses", [False, True])
def test_agents_of_openai_in_parallel_are_a_sample_each(responses):
    def replies(prompt):
        return "The answer is 36." if "<tool_response>" in prompt else CALL

    trajectory, samples = played("clients", AGENTS, replies, stream=responses)
    assert len(samples) == 3 and trajectory.counts["calls_extends"] == 3
    assert trajectory.turns[-1].notes[-1].attachments["stdout"] == f"{['The answer is 36.'] * 3}\n"


def test_mini_swe_agent_goes_on_behind_the_reply_that_it_threw_away():
    bash = "I look.\n\n```mswea_bash_command\necho 36\n```"
    end = "Done.\n\n```mswea_bash_command\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"
    trajectory, samples = played("mini_swe", MINI, [bash, "no command", end])
    assert len(samples) == 2 and (trajectory.counts["calls_extends"], trajectory.counts["calls_branch"]) == (1, 1)
    assert "Submitted" in trajectory.turns[-1].notes[-1].attachments["stdout"]


def test_a_client_that_gives_up_and_asks_again_gets_the_reply_that_was_sampled():
    trajectory, samples = played("clients", IMPATIENT, ["12 36", "36"], pace_s=0.25)
    assert len(samples) == 2 and trajectory.counts["calls_retried"] >= 2
    assert trajectory.turns[-1].notes[-1].attachments["stdout"] == "12 36\n36\n"
