"""A server that scores, and one that fails, hangs and answers nonsense."""

import asyncio

import pytest

from tests.reward.loopback_server import answer, computed, drop, hang, raw, serving, slow, trickle
from tests.reward.reward_samples import make_trajectory
from whet.reward import RewardConfig, RewardError, RewardTimeout, build_reward
from whet.types import Rewards


def score(url, *texts, timeout_s=5.0, **options):
    reward = build_reward(RewardConfig(name="remote", options={"url": url, "backoff_s": 0.0, **options}, timeout_s=timeout_s))

    async def score_all():
        calls = [reward(make_trajectory(text, metadata={"a": [1]})) for text in texts or ("hello",)]
        return await asyncio.wait_for(asyncio.gather(*calls), 30.0)

    try:
        return asyncio.run(score_all())
    finally:
        reward.close()


def test_a_number_is_the_reward_and_the_request_has_the_row():
    with serving(answer(0.75)) as (url, script):
        assert score(url + "/score?kind=a") == [Rewards(0.75, {"remote": 0.75})]
    assert script.requests == [
        {"prompt": [{"role": "user", "content": "How many?"}], "response": "hello", "label": "42", "metadata": {"a": [1]}}
    ]


@pytest.mark.parametrize(
    ("value", "options", "total", "components"),
    [
        ({"a": 1, "b": 0.5}, {}, 1.5, {"a": 1.0, "b": 0.5}),
        ({"total": 2, "a": 1}, {}, 2.0, {"a": 1.0}),
        ({"score": -1.0, "acc": False, "pred": "x"}, {"score_key": "score"}, -1.0, {"score": -1.0, "acc": 0.0}),
        (1, {}, 1.0, {"remote": 1.0}),
    ],
)
def test_the_forms_of_an_answer(value, options, total, components):
    with serving(answer(value)) as (url, _):
        (found,) = score(url, **options)
    assert (found.total, dict(found.components)) == (total, components)


@pytest.mark.parametrize("failure", [answer({"e": 1}, 500), answer("busy", 429), raw(b"<html>"), drop, answer("0.5"), answer(float("nan"))])
def test_a_failure_is_tried_again(failure):
    with serving(failure, failure, answer(0.25)) as (url, script):
        assert score(url, attempts=3)[0].total == 0.25
        assert len(script.requests) == 3


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (answer({"e": "out of memory"}, 500), "answered 500 .*out of memory"),
        (raw(b"<html>"), "is not JSON: '<html>'"),
        (answer([1]), r"cannot be used: the reward is \[1\] \(list\)"),
        (answer(None), "cannot be used"),
        (answer({}), "empty mapping"),
        (answer(float("inf")), "must be finite"),
        (raw(b"[" * 100_000), "is not JSON"),
        (raw(b"1" * (2**22 + 10)), "longer than"),
        (drop, "RemoteDisconnected"),
    ],
)
def test_a_failure_that_stays_is_an_error_and_no_score(failure, words):
    with serving(failure) as (url, script):
        with pytest.raises(RewardError, match=rf"reward remote on task 'demo/3': http://127.*{words}.*\(attempt 2 of 2\)") as error:
            score(url, attempts=2)
        assert not isinstance(error.value, RewardTimeout) and len(script.requests) == 2


def test_a_refusal_is_final_at_once():
    with serving(answer("no such model", 404)) as (url, script):
        with pytest.raises(RewardError, match=r"404 Not Found: '\"no such model\"' \(attempt 1 of 10\)"):
            score(url)
        assert len(script.requests) == 1
    with serving(answer("x", 307)) as (url, _), pytest.raises(RewardError, match="307"):
        score(url)


@pytest.mark.parametrize("step", [hang, trickle])
def test_a_hang_ends_at_the_deadline_as_a_timeout(step):
    with serving(step) as (url, script):
        with pytest.raises(RewardTimeout, match=r"did not answer within 0\.3 s \(attempt 2 of 2\)"):
            score(url, attempts=2, timeout_s=0.3)
        assert len(script.requests) == 2


def test_a_hang_that_ends_is_scored():
    with serving(hang, answer(1.0)) as (url, _):
        assert score(url, timeout_s=0.5)[0].total == 1.0


def test_nobody_listens():
    with serving(answer(1.0)) as (url, _):
        pass
    with pytest.raises(RewardError, match="ConnectionRefusedError"):
        score(url, attempts=2)


def test_requests_under_way_are_bounded():
    with serving(slow(1.0, 0.05)) as (url, script):
        assert [rewards.total for rewards in score(url, *map(str, range(12)), max_concurrent=3)] == [1.0] * 12
        assert script.most_busy <= 3
        assert sorted(request["response"] for request in script.requests) == sorted(map(str, range(12)))


def test_answers_go_to_their_own_requests():
    with serving(computed(lambda request: float(request["response"]))) as (url, _):
        assert [rewards.total for rewards in score(url, *map(str, range(20)))] == [float(i) for i in range(20)]


def test_a_key_from_the_environment(monkeypatch):
    monkeypatch.setenv("SCORER_KEY", "s3cret")
    with serving(answer(1.0)) as (url, script):
        score(url, api_key_env="SCORER_KEY")
        assert script.headers[0]["Authorization"] == "Bearer s3cret"
        monkeypatch.delenv("SCORER_KEY")
        with pytest.raises(ValueError, match=r"SCORER_KEY .*is not set"):
            score(url, api_key_env="SCORER_KEY")
    with pytest.raises(ValueError, match="'ftp://x' is not the address of a server"):
        score("ftp://x")


def test_closing_ends_what_is_under_way():
    with serving(hang) as (url, script):
        reward = build_reward(RewardConfig(name="remote", options={"url": url, "attempts": 1}, timeout_s=60.0))

        async def close_meanwhile():
            call = asyncio.create_task(reward(make_trajectory("x")))
            while not script.requests:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(reward.close)
            return await asyncio.wait_for(asyncio.gather(call, return_exceptions=True), 10.0)

        (result,) = asyncio.run(close_meanwhile())
        assert isinstance(result, RewardError) and "is closed" in str(result)
        with pytest.raises(RewardError, match="is closed"):
            asyncio.run(reward(make_trajectory("x")))


def test_a_cancelled_call_leaves_nothing_behind():
    with serving(hang) as (url, script):
        reward = build_reward(RewardConfig(name="remote", options={"url": url}, timeout_s=60.0))

        async def cancel():
            call = asyncio.create_task(reward(make_trajectory("x")))
            while not script.requests:
                await asyncio.sleep(0.01)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

        asyncio.run(cancel())
        reward.close()  # would wait for the thread
