"""Errors of configuration."""

from __future__ import annotations

from tests.errors.error_bench import Bench, Case, Told, together


def unknown_key(bench: Bench) -> Told:
    return together(bench.refused("data.trian=my.jsonl"), bench.refused("lr=1e-5"))


def wrong_type(bench: Bench) -> Told:
    return bench.refused("num_rollouts=many", "train.optim.lr=-1", "batch=8")


def required_key(bench: Bench) -> Told:
    text = (bench.folder / "run.toml").read_text()
    short = bench.file("short.toml", text.replace('[reward]\nname = "exact"\n', "").replace('path = "model"\n', ""))
    return bench.refused(config=short)


def not_toml(bench: Bench) -> Told:
    return bench.refused(config=bench.file("broken.toml", 'run_dir = "runs/demo"\nnum_rollouts = 1 0\n'))


def no_file(bench: Bench) -> Told:
    return bench.refused(config="rnu.toml")


def batch_sizes(bench: Bench) -> Told:
    return bench.refused("batch.prompts_per_rollout=32", "batch.samples_per_prompt=8", "batch.samples_per_step=100")


def one_sample(bench: Bench) -> Told:
    return bench.refused("batch.samples_per_prompt=1")


def missing_model(bench: Bench) -> Told:
    return together(
        bench.refused("algo.distill_coef=0.5"), bench.refused("reference.refresh_every=5"), bench.refused("critic.optim.lr=1e-4")
    )


def no_effect(bench: Bench) -> Told:
    return together(
        bench.refused("algo.name=dr_grpo", "algo.lam=0.95"),
        bench.refused("algo.options={beta = 1}"),
        bench.refused("algo.loss.tau_positive=2.0", "algo.kl_reward.target=0.1"),
    )


def sampling(bench: Bench) -> Told:
    return together(bench.refused("rollout.min_p=0.1"), bench.refused("rollout.temperature=0"))


def longer_than_the_model(bench: Bench) -> Told:
    return bench.refused("rollout.max_tokens=100000")


def length_of_run(bench: Bench) -> Told:
    return bench.refused("num_epochs=2")


CONFIGURATION = (
    Case(
        id="unknown-key",
        title="An unknown key",
        cause="A key is misspelt, or stands in the wrong table.",
        remedy="Write the key that the message suggests. `whet train --keys` lists all of them.",
        words=("run.toml: data.trian: unknown key", "did you mean data.train?", "there is train.optim.lr"),
        provoke=unknown_key,
        seen_by_check=True,
    ),
    Case(
        id="wrong-type",
        title="A value of the wrong type or out of range",
        cause="Every setting has a type, and numbers have a range. All that is wrong in a file is listed at once.",
        remedy="Give what was expected. `whet train --keys` shows each key's type, default and meaning.",
        words=('num_rollouts = "many": expected an integer', "train.optim.lr = -1", "batch = 8: expected a table"),
        provoke=wrong_type,
        seen_by_check=True,
    ),
    Case(
        id="required-key",
        title="A required key is missing",
        cause="A few settings have no default: `model.path`, `data.train` and the reward.",
        remedy="Set the key, in the file or as `key=value` behind it.",
        words=("model.path: is required", "reward: is required"),
        provoke=required_key,
        seen_by_check=True,
    ),
    Case(
        id="not-toml",
        title="A file that is not TOML",
        cause="The file breaks TOML's rules; the message has its line and column.",
        remedy="Correct that line. Texts stand in quotes, lists in brackets.",
        words=("broken.toml:2: not valid TOML",),
        provoke=not_toml,
        seen_by_check=True,
    ),
    Case(
        id="no-configuration-file",
        title="There is no such configuration file",
        cause="The path is misspelt, or relative to another folder than the current one.",
        remedy="Correct the path.",
        words=("there is no configuration file rnu.toml",),
        provoke=no_file,
        seen_by_check=True,
    ),
    Case(
        id="batch-sizes",
        title="Batch sizes that contradict each other",
        cause="`prompts_per_rollout x samples_per_prompt = samples_per_step x steps_per_rollout` has no solution in whole numbers.",
        remedy="Leave one of the four out, and it follows from the others; or change one that does not divide.",
        words=("prompts_per_rollout (32) x samples_per_prompt (8)", "samples_per_step (100)", "256/100, no whole number"),
        provoke=batch_sizes,
        seen_by_check=True,
    ),
    Case(
        id="one-sample",
        title="GRPO with one sample per prompt",
        cause="GRPO's advantage is a comparison with the other samples of the same prompt. With one sample it is always 0.",
        remedy="Set `batch.samples_per_prompt` to 2 or more; 8 is usual.",
        words=("batch.samples_per_prompt must be at least 2, not 1",),
        provoke=one_sample,
        seen_by_check=True,
    ),
    Case(
        id="missing-model",
        title="A teacher, reference or critic that is missing, or that nobody asks",
        cause="What the algorithm learns from and the models beside the policy do not go together, so one of them was left out by mistake.",
        remedy="Set the path or the weight that the message names, or drop the table ([algorithms.md](algorithms.md)).",
        words=("set teacher.path, or distill_coef=0", "[reference] is set, but algo.name=grpo keeps none", "[critic] is set, but"),
        provoke=missing_model,
        seen_by_check=True,
    ),
    Case(
        id="no-effect",
        title="A setting that nothing reads",
        cause="The algorithm, loss or correction that is chosen does not have this setting, so it would be ignored.",
        remedy="Choose what reads it, as the message says, or leave the setting out. Defaults may be written out anywhere.",
        words=(
            'algo.lam is a setting of ppo; algo.name is "dr_grpo"',
            'algo.options is a setting of module:function; algo.name is "grpo"',
            "tau_positive=2.0 has no effect with name=clip; set name=sapo",
            "target=0.1 has no effect with coef=0",
        ),
        provoke=no_effect,
        seen_by_check=True,
    ),
    Case(
        id="sampling",
        title="Sampling that training could not replay",
        cause="Training needs each token's log-prob under the distribution that it was sampled from.",
        remedy="Sample from the policy itself in training, or from its nucleus (`rollout.top_p`, `rollout.top_k`). Other settings are for evaluation: `evaluate.sets.NAME.rollout`.",
        words=("rollout.min_p=0.1 cannot be trained on", "rollout.temperature=0 cannot be trained on"),
        provoke=sampling,
        seen_by_check=True,
    ),
    Case(
        id="longer-than-the-model",
        title="Trajectories longer than the model",
        cause="`rollout.max_tokens` is more than the model has positions, or than the engine's cache holds.",
        remedy="Lower `rollout.max_tokens`, or raise `engine.embedded.cache_tokens` if that is the limit. A model that is good for more than its "
        "config.json says gets it by `model.config.max_position_embeddings`.",
        words=("rollout.max_tokens is 100000", "2048", "engine.embedded.cache_tokens"),
        provoke=longer_than_the_model,
        seen_by_check=True,
    ),
    Case(
        id="length-of-run",
        title="A run with two lengths, or none",
        cause="A run's length is either a number of rollouts or a number of passes over the prompts.",
        remedy="Keep one of the two keys.",
        words=("set exactly one of num_rollouts (here 1) and num_epochs (here 2",),
        provoke=length_of_run,
        seen_by_check=True,
    ),
)
