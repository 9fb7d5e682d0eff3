"""Draws the pictures of docs/viewer.md and README: the viewer's views, of a quickstart and of the worked examples.

    whet quickstart --seed 0
    python docs/draw_viewer.py runs/quickstart-seed0 [FOLDER FOR THE PICTURES]

Needs playwright, Chromium (apt-get install chromium, or CHROMIUM=program) and a font with Chinese letters (fonts-noto-cjk).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from whet.observe.records import read_records

WIDE = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 780}


@contextmanager
def viewed(*arguments: str) -> Iterator[str]:
    """The address of a viewer that runs inside the block."""
    command = [sys.executable, "-u", "-m", "whet", "view", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def address(place: str, **given: Any) -> str:
    """The part of an address that says which view it is."""
    return f"#/{place}?{urlencode(given)}"


def lesson(name: str, trajectory: str, **more: Any) -> str:
    """The address of a trajectory of a worked example."""
    return address("trajectory", run=name, rollout=0, trajectory=trajectory, **more)


def shots(run: Path) -> list[tuple[str, str, str, str, dict[str, Any]]]:
    """Name, viewer (run or lesson), address, the element that is waited for, and options of the window."""
    name = f"{run.name}/rl"
    rows = read_records(run / "rl/rollouts" / "rollout_000002.parquet")
    row = next(row for row in rows if len(row["turns"]) > 1 and row["mean_abs_advantage"])
    place = [i for i, weight in enumerate(row["first_weights"]) if weight is not None][4]
    played = {"run": name, "rollout": 2, "trajectory": row["trajectory"]}
    token, top = ".token-panel [data-quantity]", {"scroll": "h2.below-top"}
    return [
        ("runs", "run", address("runs", run=name, smooth=0.6), ".chart canvas", {}),
        ("groups", "run", address("groups", run=name, rollout=2, sort="spread"), ".group", {}),
        ("trajectory", "run", address("trajectory", **played, token=place), token, {"scroll": "h2:text-is('Conversation')"}),
        ("token", "lesson", lesson("research", "lesson/0#0/0", token=178), token, top),
        ("tool", "lesson", lesson("research", "lesson/0#0/0", token=189), ".hop", {**top, "height": 620}),
        ("clip", "lesson", lesson("one-plus-one-grpo", "lesson/0#0/3", token=16, use="last", colour="clip"), token,
         {"scroll": "h3:text-is('Loss')"}),
        ("steps", "lesson", lesson("research", "lesson/0#0/0", view="steps"), "tr[data-step]", {**top, "height": 760}),
        ("compare", "lesson", address("compare", run="research", rollout=0, trajectory="lesson/0#0/0", run2="research", rollout2=0,
                                      trajectory2="lesson/0#0/1"), ".diff", {}),
        ("worst", "run", address("compare", run=name, rollout=2), ".list", {"height": 620}),
        ("lessons", "lesson", "", ".stops", {}),
        ("chinese", "lesson", lesson("poem", "lesson/0#0/0", token=43, use="last"), token, {**top, "locale": "zh-CN", "dark": True}),
        ("phone", "lesson", lesson("one-plus-one-ppo", "lesson/0#0/0", token=20), token, {**top, "phone": True}),
    ]  # fmt: skip


def draw(browser: Any, where: str, wanted: str, options: dict[str, Any], file: Path) -> None:
    """Save a picture of a view."""
    size = PHONE if options.get("phone") else {**WIDE, "height": options.get("height", WIDE["height"])}
    colours = "dark" if options.get("dark") else "light"
    context = browser.new_context(viewport=size, color_scheme=colours, locale=options.get("locale", "en-US"), device_scale_factor=1.25)
    page = context.new_page()
    page.goto(where)
    page.wait_for_selector(wanted)
    if "scroll" in options:
        page.locator(options["scroll"]).first.evaluate("place => scrollTo(0, place.getBoundingClientRect().top + scrollY - 70)")
    page.wait_for_timeout(400)
    page.screenshot(path=str(file))
    context.close()


def main(run: Path, pictures: Path) -> None:
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as driver, viewed(str(run)) as of_run, viewed("--lesson", "all") as of_lesson:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, viewer, where, wanted, options in shots(run):
            start = of_run if viewer == "run" else of_lesson
            draw(browser, start + where, wanted, options, pictures / f"viewer-{name}.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent / "pictures")
