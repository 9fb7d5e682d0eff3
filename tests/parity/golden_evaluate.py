"""Pass rates, validation metrics, filters, periodic actions, reward shaping."""

from __future__ import annotations

from statistics import fmean

from tests.parity.golden_batches import by_source
from tests.parity.resampling import sample_statistics
from whet.core.advantages import nothing_to_compare
from whet.data.files import split_slice
from whet.evaluate.passk import pass_at_k
from whet.reward.base import read_score
from whet.reward.published.dapo import overlong_penalty
from whet.train.batching import due


def pass_rate(case):
    rewards, size = values_of(case), case["params"]["group_size"]
    groups = [rewards[i : i + size] for i in range(0, len(rewards), size)]
    ks = [2**i for i in range(size.bit_length()) if 2**i <= size]
    return {f"pass@{k}": fmean(pass_at_k(size, sum(r == 1 for r in group), k) for group in groups) for k in ks}


def values_of(case):
    """The rewards of a case's samples, which may be mappings with a key that names the reward."""
    key = case["params"].get("reward_key") or case["inputs"].get("reward_key")
    return [read_score(reward, key).total if isinstance(reward, dict) else reward for reward in case["inputs"]["rewards"]]


def nonzero_std(case):
    reason = nothing_to_compare(values_of(case))
    return {"keep": reason is None, "reason": reason}


def with_fallback(case):
    """The same verdict; that a group is called in where too few pass is `control.refill = false` here, not the filter's to say."""
    return {**nonzero_std(case), **({"keep_when_insufficient": True} if "keep_when_insufficient" in case["outputs"] else {})}


def path_slice(case):
    """A data file's path and the slice of its rows."""
    path, rows = split_slice(next(value for value in case["inputs"].values() if isinstance(value, str)))
    bounds = None if rows is None else [rows.start, rows.stop]
    known = {"path": path, "real_path": path, "slice": bounds, "row_slice": bounds, "start": rows and rows.start}
    known |= {"end": rows and rows.stop, "stop": rows and rows.stop}
    if "num_rows" in case["inputs"]:
        known["rows"] = list(range(case["inputs"]["num_rows"]))[rows or slice(None)]
    return {key: known[key] for key in case["outputs"]}


def periodic(case):
    """The end of an epoch is an interval of its own there, and without an interval nothing ever recurs."""
    return {
        "run": [
            interval is not None and (due(rollout_id + 1, total or 0, interval) or due(rollout_id + 1, 0, per_epoch))
            for rollout_id, interval, per_epoch, total in case["inputs"]["cases"]
        ]
    }


def dapo_overlong(case):
    given, params = case["inputs"], case["params"]
    penalties = [
        overlong_penalty(length, params["max_resp_len"], params["overlong_buffer_len"], params["penalty_factor"])
        for length in given["response_lengths"]
    ]
    rewards = [score + penalty for score, penalty in zip(given["scores"], penalties, strict=True)]
    return {"reward_at_last_token": rewards, "overlong_reward": penalties}


def validation_metrics(case):
    """A mean over the tasks of each source; what they answered is only voted on."""
    given, params = case["inputs"], case["params"]
    samples: dict[str, dict[str, list[int]]] = {}
    for i, (source, uid) in enumerate(zip(given["data_sources"], given["sample_uids"], strict=True)):
        samples.setdefault(source, {}).setdefault(uid, []).append(i)
    out: dict[str, dict[str, dict[str, float]]] = {}
    for source, tasks in samples.items():
        for name, values in given["infos"].items():
            if isinstance(values[0], str):
                continue
            collected: dict[str, list[float]] = {}
            for places in tasks.values():
                answers = given["infos"].get("pred")
                found = sample_statistics(
                    [values[i] for i in places],
                    None if answers is None else [answers[i] for i in places],
                    num_draws=params["n_bootstrap"],
                    seed=params["seed"],
                )
                for key, value in found.items():
                    collected.setdefault(key, []).append(value)
            out.setdefault(source, {})[name] = {key: fmean(numbers) for key, numbers in collected.items()}
    return out


ADAPTERS = {
    "slime_misc": by_source(
        {
            "compute_pass_rate": pass_rate,
            "check_reward_nonzero_std": nonzero_std,
            "check_reward_nonzero_std_with_fallback": with_fallback,
            "_parse_generalized_path": path_slice,
            "should_run_periodic_action": periodic,
        }
    ),
    "verl_misc": by_source({"DAPORewardManager": dapo_overlong, "process_validation_metrics": validation_metrics}),
}
