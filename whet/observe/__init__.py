"""What a run tells of itself: metrics, trackers, phase times, the display, and records of every token."""

from whet.observe.display import Display, Headline, PlainDisplay, QuietDisplay, build_display
from whet.observe.meter import Meter
from whet.observe.metrics import (
    Last,
    Max,
    Mean,
    Metric,
    Metrics,
    Min,
    Total,
    distribution,
    flatten,
    merge_metrics,
)
from whet.observe.peaks import memory
from whet.observe.records import RecordWriter, read_records, read_table
from whet.observe.spans import Phases
from whet.observe.trackers import (
    JsonlTracker,
    ObserveConfig,
    TensorBoardTracker,
    Tracker,
    WandbConfig,
    WandbTracker,
    build_trackers,
)

__all__ = [
    "Display",
    "Headline",
    "JsonlTracker",
    "Last",
    "Max",
    "Mean",
    "Meter",
    "Metric",
    "Metrics",
    "Min",
    "ObserveConfig",
    "Phases",
    "PlainDisplay",
    "QuietDisplay",
    "RecordWriter",
    "TensorBoardTracker",
    "Total",
    "Tracker",
    "WandbConfig",
    "WandbTracker",
    "build_display",
    "build_trackers",
    "distribution",
    "flatten",
    "memory",
    "merge_metrics",
    "read_records",
    "read_table",
]
