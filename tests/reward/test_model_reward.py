"""The reward `model`: its scores are transformers' own, whatever it is scored with, and what cannot be scored is an error."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from whet.data.template import Renderer, load_tokenizer
from whet.model.attention import PackedRow
from whet.model.config import ModelConfig
from whet.model.scalar import load_scalar
from whet.quickstart.model import SmallModelConfig, make_model
from whet.reward import RewardConfig, RewardError, build_reward
from whet.reward.build import reward_models
from whet.types import Finish, Message, Origin, Outcome, Task, Trajectory, Turn

SHAPE = SmallModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)
WORDS = ["What is half of 90?", "It is 45.", "Then add 3.", "48", "No, go away!"]
TASK = Task("t", (Message("user", WORDS[0]),), origin="rows.jsonl:1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`policy`, `reward` of the same vocabulary, and `foreign` of another."""
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "policy", WORDS * 2, SHAPE, 0)
    for name, words in (("reward", WORDS), ("foreign", [*WORDS, "zebra quartz"])):
        make_model(folder / f"{name}-start", words * 2, SHAPE, 1)
        config = ModelConfig(path="", device="cpu")
        model = load_scalar(folder / f"{name}-start", config, trainable=False, new_head="normal", seed=1)
        model.config.get_text_config().pad_token_id = None
        model.hf.save_pretrained(folder / name)
        load_tokenizer(folder / f"{name}-start").save_pretrained(folder / name)
    return folder


def reward_of(folder, policy=None, **options):
    table = {"name": "model", "options": {"path": str(folder / options.pop("model", "reward")), "device": "cpu", **options}}
    return build_reward(RewardConfig.model_validate(table), None if policy is None else folder / policy)


def score(reward, *trajectories):
    async def all_at_once():
        return await asyncio.gather(*(reward(trajectory) for trajectory in trajectories))

    try:
        return [rewards.total for rewards in asyncio.run(all_at_once())]
    finally:
        reward.close()


def own_score(folder, tokens):
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([tokens])).logits)


def said(folder, *replies, finish=Finish.STOP, model="policy"):
    """A trajectory of the policy with these replies, the user's words between them."""
    renderer = Renderer(load_tokenizer(folder / model))
    stop, turns, last = renderer.stop_token_ids[0], [], ()
    for i, reply in enumerate(replies):
        context = renderer.reply((Message("user", WORDS[2]),), last) if i else renderer.prompt(TASK)
        last = (*renderer.encode(reply), *((stop,) if finish is Finish.STOP else ()))
        num = len(last)
        turns.append(Turn(context, (Origin.PROMPT,) * len(context), last, (0.0,) * num, (0,) * num, Message("assistant", reply), finish))
    return Trajectory("t/0", TASK, tuple(turns), Outcome.COMPLETED)


def tokens_of(trajectory):
    return [token for turn in trajectory.turns for token in (*turn.context, *turn.tokens)]


@pytest.mark.parametrize("options", [{"policy": "policy"}, {"reads": "tokens"}, {"batch_tokens": 1, "reads": "tokens"}])
def test_it_reads_the_policys_own_tokens_of_several_turns(folder, options):
    trajectories = [said(folder, WORDS[1]), said(folder, WORDS[1], WORDS[3]), said(folder, WORDS[4], finish=Finish.LENGTH)]
    found = score(reward_of(folder, **options), *trajectories)
    expected = [own_score(folder / "reward", tokens_of(trajectory)) for trajectory in trajectories]
    assert found == pytest.approx(expected, abs=1e-5)
    assert len(set(found)) == 3


@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
def test_messages_go_through_its_own_template_and_a_cut_reply_has_no_end(folder, finish):
    trajectory = said(folder, WORDS[1], finish=finish)
    theirs = tokens_of(said(folder, WORDS[1], finish=finish, model="foreign"))
    assert theirs != tokens_of(trajectory)
    found = score(reward_of(folder, "policy", model="foreign"), trajectory)
    assert found == pytest.approx([own_score(folder / "foreign", theirs)], abs=1e-5)


def test_after_a_rewritten_history_only_what_followed_is_read(folder):
    one, two = said(folder, WORDS[4]).turns[0], said(folder, WORDS[1])
    both = replace(two, turns=(one, replace(two.turns[0], restart=True)))
    assert score(reward_of(folder, "policy"), both, two)[0] == pytest.approx(own_score(folder / "reward", tokens_of(two)), abs=1e-5)


def test_a_plain_text_prompt_is_read_as_it_stands(folder):
    trajectory = said(folder, WORDS[1])
    plain = Trajectory("t/0", Task("t", WORDS[0]), trajectory.turns, Outcome.COMPLETED)
    renderer = Renderer(load_tokenizer(folder / "reward"))
    tokens = [*renderer.encode(WORDS[0]), *renderer.encode(WORDS[1]), renderer.stop_token_ids[0]]
    assert score(reward_of(folder, reads="messages"), plain) == pytest.approx([own_score(folder / "reward", tokens)], abs=1e-5)


def test_in_deterministic_mode_the_bits_do_not_depend_on_the_company(folder):
    trajectories = [said(folder, reply) for reply in (*WORDS, " ".join(WORDS), WORDS[0] * 5)]
    torch.use_deterministic_algorithms(True)
    try:
        together = score(reward_of(folder, "policy"), *trajectories)
        alone = [score(reward_of(folder, "policy"), trajectory)[0] for trajectory in trajectories]
    finally:
        torch.use_deterministic_algorithms(False)
    assert together == alone


def test_what_it_cannot_score_is_an_error_and_never_a_number(folder, monkeypatch):
    with pytest.raises(RewardError, match=r"task 't' \(rows.jsonl:1\).*conversations of one turn, and there are 2"):
        score(reward_of(folder, "policy", model="foreign"), said(folder, WORDS[1], WORDS[3]))
    with pytest.raises(RewardError, match=r"positions; lower rollout\.max_tokens"):
        score(reward_of(folder, "policy"), said(folder, "45 " * 4000))
    reward = reward_of(folder, "policy")
    monkeypatch.setattr("whet.model.scalar.ScalarModel.scores", lambda model, hidden: torch.full((len(hidden),), torch.nan))
    with pytest.raises(RewardError, match=r"score is nan: its weights or its dtype \(float32\)"):
        score(reward, said(folder, WORDS[1]))


def test_models_that_do_not_fit_are_refused_at_the_start(folder):
    with pytest.raises(ValueError, match=r"reward.options.path: .* is a language model"):
        reward_of(folder, model="policy")
    with pytest.raises(ValueError, match=r"the vocabulary of .*foreign is not the policy's"):
        reward_of(folder, "policy", model="foreign", reads="tokens")


def test_a_wait_can_be_given_up_and_a_failure_is_everybodys(folder, monkeypatch):
    reward = reward_of(folder, "policy")

    async def give_up():
        waiting = [asyncio.ensure_future(reward(said(folder, word))) for word in WORDS]
        await asyncio.sleep(0)
        waiting[1].cancel()
        return await asyncio.gather(*waiting, return_exceptions=True)

    found = asyncio.run(give_up())
    assert isinstance(found[1], asyncio.CancelledError)
    assert all(not isinstance(rewards, BaseException) for i, rewards in enumerate(found) if i != 1)

    def fail(*arguments):
        raise MemoryError("no room")

    monkeypatch.setattr("whet.reward.model_reward.PackedRow", fail)
    with pytest.raises(RewardError, match="MemoryError: no room"):
        score(reward, said(folder, WORDS[1]))


def test_what_waits_as_it_is_closed_fails_and_what_is_being_scored_does_not(folder, monkeypatch):
    reward, busy, go_on = reward_of(folder, "policy", batch_tokens=1), threading.Event(), threading.Event()

    def slow(*arguments):
        busy.set()
        assert go_on.wait(10)
        return PackedRow(*arguments)

    monkeypatch.setattr("whet.reward.model_reward.PackedRow", slow)

    async def close_meanwhile():
        waiting = [asyncio.ensure_future(reward(said(folder, word))) for word in WORDS]
        await asyncio.to_thread(busy.wait, 10)
        closing = asyncio.ensure_future(asyncio.to_thread(reward.close))
        await asyncio.sleep(0.1)
        go_on.set()
        await closing
        return await asyncio.gather(*waiting, return_exceptions=True)

    first, *others = asyncio.run(close_meanwhile())
    assert not isinstance(first, BaseException)
    assert all(isinstance(other, RewardError) and "closed before" in str(other) for other in others)


def test_closing_after_everybody_gave_up_is_no_error_and_closes_the_others_too(folder, monkeypatch):
    table = {"one": {"name": "model", "options": {"path": str(folder / "reward"), "device": "cpu"}}, "two": {"name": "random"}}
    reward = build_reward(RewardConfig.model_validate({"components": table}), folder / "policy")
    go_on, closed = threading.Event(), []
    monkeypatch.setattr("whet.reward.model_reward.PackedRow", lambda *arguments: go_on.wait(10) and PackedRow(*arguments))
    monkeypatch.setattr(reward._pool, "close", lambda: closed.append("pool"))

    async def give_up():
        waiting = [asyncio.ensure_future(reward(said(folder, word))) for word in WORDS]
        await asyncio.sleep(0.2)
        for wait in waiting:
            wait.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(give_up())
    go_on.set()
    reward.close()
    assert closed == ["pool"]


def test_reward_models_are_found_wherever_they_are():
    by_row = {"table": "none", "rewards": {"x": {"name": "model", "options": {"path": "two"}}}}
    table = {"a": {"name": "model", "options": {"path": "one"}}, "b": {"name": "random"}, "c": {"name": "dispatch", "options": by_row}}
    assert [options.path for options in reward_models(RewardConfig.model_validate({"components": table}))] == ["one", "two"]
    assert [options.path for options in reward_models(RewardConfig(name="model", options={"path": "one"}))] == ["one"]
