"""The account of sampled tokens: trained, dropped for a reason, or held."""

from dataclasses import replace

import pytest

from whet.observe.metrics import Total, flatten
from whet.rollout.recipe import Recipe
from whet.rollout.token_account import CARRIED, HELD, SAMPLED, TRAINED, unaccounted
from whet.types import UNTRAINED_TOKENS, Finish, Group, Message, Origin, Outcome, Rewards, Task, Trajectory, Turn

TASK = Task("t", "q")


def played(number, num, version=1, **fields):
    turn = Turn((1, 2), (Origin.PROMPT,) * 2, (3,) * num, (-1.0,) * num, (version,) * num, Message("assistant", ""), Finish.STOP)
    return Trajectory(f"t/{number}", TASK, (turn,), Outcome.COMPLETED, Rewards(float(number)), **fields)


def used(*groups, **recipe):
    return flatten(Recipe(**recipe).samples(groups, version=1)[1])


def test_each_token_of_a_group_that_trains_has_one_place():
    failed = replace(played(2, 40), outcome=Outcome.TIMEOUT, rewards=None)
    aside = played(3, 50, counts={UNTRAINED_TOKENS: 7})
    found = used(Group(TASK, (played(0, 10), played(1, 20, version=0), failed, aside)), max_staleness=0)
    assert {name: count for name, count in found.items() if name.startswith("tokens/")} == {
        "tokens/trained": 60,
        "tokens/dropped/failed": 40,
        "tokens/dropped/stale": 20,
        "tokens/dropped/untrained": 7,
    }


@pytest.mark.parametrize(("outcome", "trained"), [(Outcome.COMPLETED, 30), (Outcome.ENV_ERROR, 0)])
def test_a_greedy_trajectory_trains_nothing_and_takes_its_siblings_along_if_it_failed(outcome, trained):
    greedy = replace(played(9, 5), outcome=outcome, rewards=Rewards(0.0) if outcome.valid else None)
    found = used(Group(TASK, (played(0, 10), played(1, 20)), greedy))
    assert found["tokens/trained"] == trained and found["tokens/dropped/greedy"] == 5
    assert found.get("tokens/dropped/no_baseline", 0) == 30 - trained


def test_the_environment_s_tokens_never_count_even_where_all_tokens_train():
    assert used(Group(TASK, (played(0, 10), played(1, 20))), train_on="all")["tokens/trained"] == 30


def test_what_is_missing_is_told():
    whole = {SAMPLED: Total(100), CARRIED: Total(10), TRAINED: Total(60), HELD: Total(30), "tokens/dropped/stale": Total(20)}
    assert unaccounted(whole) == 0
    assert unaccounted({**whole, TRAINED: Total(59)}) == 1 and unaccounted({**whole, HELD: Total(31)}) == -1
