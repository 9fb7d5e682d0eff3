"""Run records: the content of every rollout, token by token, in parquet files that any tool opens (docs/records.md).

One row is one training sample, or one trajectory that gave none (it failed, was filtered, or is a greedy one that others are compared
with), so that no sampled token is missing from the records of its rollout.
"""

from whet.observe.records.background import RecordThread
from whet.observe.records.files import ROLLOUTS, drop_records, read_records, read_table
from whet.observe.records.index import read_index
from whet.observe.records.numbers import GroupNumbers, RolloutNumbers
from whet.observe.records.schema import COMPUTED, SAMPLED, SCHEMA, VERSION, check_version
from whet.observe.records.writer import RecordWriter

__all__ = [
    "COMPUTED",
    "ROLLOUTS",
    "SAMPLED",
    "SCHEMA",
    "VERSION",
    "GroupNumbers",
    "RecordThread",
    "RecordWriter",
    "RolloutNumbers",
    "check_version",
    "drop_records",
    "read_index",
    "read_records",
    "read_table",
]
