"""What one part of the settings takes over from another."""

import pytest

from whet.build.learners import algorithm_of, check_models
from whet.serve.settings import ServedEngine
from whet.settings.rl import RunConfig, check_together, evaluation_env, evaluation_rows, training_rows
from whet.settings.supervised import SupervisedRunConfig


def config(**changes):
    base = {
        "model": {"path": "m"},
        "data": {"train": "train.jsonl", "prompt_key": "question", "label_key": "answer", "max_prompt_tokens": 9, "shuffle": False},
        "reward": {"name": "math"},
        "env": {"name": "tools", "tools": ["calculator"], "tool_timeout_s": 3.0},
        "seed": 5,
    }
    return RunConfig.model_validate({**base, **changes})


def test_training_rows_are_the_data_table_with_the_runs_seed():
    rows = training_rows(config())
    assert (rows.path, rows.prompt_key, rows.label_key, rows.max_prompt_tokens, rows.shuffle, rows.seed) == (
        "train.jsonl", "question", "answer", 9, False, 5,
    )  # fmt: skip


def test_an_evaluation_set_has_trainings_columns_but_those_it_names_and_drops_nothing():
    chosen = {"path": "test.jsonl", "rows": {"label_key": "gold"}}
    run = config(evaluate={"sets": {"x": chosen}})
    rows = evaluation_rows(run, run.evaluate.sets["x"])
    assert (rows.path, rows.prompt_key, rows.label_key) == ("test.jsonl", "question", "gold")
    assert (rows.max_prompt_tokens, rows.shuffle) == (None, False)


def test_an_evaluation_set_has_trainings_environment_unless_it_names_its_own():
    sets = {
        "same": {"path": "x"},
        "slower": {"path": "x", "env": {"tool_timeout_s": 9.0}},
        "own": {"path": "x", "env": {"name": "single_turn"}},
    }
    run = config(evaluate={"sets": sets})
    same, slower, own = (evaluation_env(run, run.evaluate.sets[name]) for name in sets)
    assert same == run.env
    assert (slower.name, slower.tools, slower.tool_timeout_s) == ("tools", ["calculator"], 9.0)
    assert (own.name, own.tools, own.tool_timeout_s) == ("single_turn", [], 30.0)


def test_how_processes_are_looked_after_is_refused_where_there_are_none():
    with pytest.raises(ValueError, match=r"restarts=1 has no effect \(engine\.pool\) with the engine in the .* own process"):
        config(engine={"pool": {"restarts": 1}})
    with pytest.raises(ValueError, match=r"restarts=1 has no effect \(engine\.pool\)"):
        ServedEngine.model_validate({"pool": {"restarts": 1}})
    assert config(engine={"pool": {"restarts": 1}, "embedded": {"copies": 2}}).engine.pool.restarts == 1
    assert ServedEngine.model_validate({"pool": {"restarts": 1}, "embedded": {"tensor_parallel": 2}}).pool.restarts == 1


def test_an_interval_without_evaluation_sets_is_refused():
    run = config(evaluate={"interval": 5}, batch={"prompts_per_rollout": 2, "samples_per_prompt": 2})
    with pytest.raises(ValueError, match="there is nothing to evaluate on: name rows in evaluate"):
        check_together(run)


def test_servers_do_not_get_model_config():
    with pytest.raises(ValueError, match=r"model\.config does not reach engine.name=vllm"):
        config(model={"path": "m", "config": {"a": 1}}, engine={"name": "vllm"})


def test_routing_replay_is_refused_where_nothing_is_replayed():
    sft = {"model": {"path": "m"}, "data": {"path": "talk.jsonl"}, "train": {"routing_replay": "old"}}
    with pytest.raises(ValueError, match=r"routing_replay=\"?old\"? has no effect \(train\) in a run without rollouts"):
        SupervisedRunConfig.model_validate(sft)
    with pytest.raises(ValueError, match=r"which engine\.embedded\.static_decode does not tell: leave static_decode out"):
        config(train={"routing_replay": "rollout"}, engine={"embedded": {"static_decode": True}})
    batch = {"prompts_per_rollout": 2, "samples_per_prompt": 2}
    one = config(train={"routing_replay": "old"}, batch=batch)
    with pytest.raises(ValueError, match=r"routing_replay=old replays what the pass over old log-probs chose, and algo.name=grpo makes"):
        check_models(one, algorithm_of(one))
    two = config(train={"routing_replay": "old"}, batch=batch | {"epochs": 2})
    check_models(two, algorithm_of(two))
