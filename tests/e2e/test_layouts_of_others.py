"""Rows as verl and slime write them train as they are."""

import json

import pyarrow as pa
import pyarrow.parquet as pq

from tests.e2e.tiny_run import QUESTIONS, make_files, run_config
from whet.observe.records import read_records
from whet.runs.commands import train


def test_verls_parquet(tmp_path):
    """The layout of its GSM8K: the label in `reward_model`, the grader by `data_source`."""
    make_files(tmp_path)
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": question + " Let's think step by step."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"split": "train", "index": i, "answer": f"#### {i}", "question": question},
        }
        for i, question in enumerate(QUESTIONS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    data = {"train": str(tmp_path / "train.parquet"), "label_key": "reward_model.ground_truth"}
    reward = {"name": "dispatch", "options": {"table": "verl", "key": "data_source"}}
    train(run_config(tmp_path, "run", data=data, reward=reward, num_rollouts=1))
    found = read_records(tmp_path / "run/rollouts/rollout_000000.parquet")
    assert {row["outcome"] for row in found} <= {"completed", "truncated"} and all(row["label"] in "0123" for row in found)
    assert all(json.loads(row["metadata"])["extra_info"]["split"] == "train" for row in found)


def test_slimes_jsonl(tmp_path):
    """The layout of its dapo-math."""
    make_files(tmp_path)
    rows = [{"prompt": [{"role": "user", "content": question}], "label": str(i)} for i, question in enumerate(QUESTIONS)]
    (tmp_path / "dapo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train(run_config(tmp_path, "run", data={"train": str(tmp_path / "dapo.jsonl")}, reward={"name": "slime_dapo"}, num_rollouts=1))
    found = read_records(tmp_path / "run/rollouts/rollout_000000.parquet")
    assert {row["outcome"] for row in found} <= {"completed", "truncated"} and all(row["reward"] is not None for row in found)
