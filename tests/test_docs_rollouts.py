"""docs/rollouts.md: its example is a run's, and its tables name what there is."""

import re
import tomllib
from pathlib import Path

from whet.rollout.control import ControlConfig
from whet.rollout.filters import FILTERS

PAGE = (Path(__file__).resolve().parents[1] / "docs/rollouts.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def first_cells(text: str) -> set[str]:
    rows = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_example_is_valid():
    (example,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    control = ControlConfig.model_validate(tomllib.loads(example)["control"])
    assert control.overlaps and control.filters[0].name in FILTERS


def test_the_filters_are_those_that_there_are():
    assert first_cells(section("Dynamic sampling")) == {*FILTERS, "module:function"}


def test_the_settings_that_it_speaks_of_are_there():
    spoken = set(re.findall(r"`control\.(\w+)", PAGE)) | {"retry_budget", "max_error_rate", "max_partial_age", "too_old", "overlap"}
    assert spoken <= ControlConfig.model_fields.keys()
    untold = [name for name in ControlConfig.model_fields if f"`{name}" not in PAGE and f"control.{name}" not in PAGE]
    assert not untold
