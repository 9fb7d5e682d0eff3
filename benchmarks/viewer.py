"""How fast the viewer opens what is large: a trajectory of 32,000 tokens, and a run of 512,000 trajectories in 1,000 rollouts.

    python benchmarks/viewer.py [--rollouts 1000] [--siblings 512] [--tokens 32000]

Needs Chromium (apt-get install chromium, or CHROMIUM=program) and playwright. Makes both runs in a temporary folder, starts `whet view` for
each, and measures in the browser: seconds from the request to the first picture that has content, frames while it scrolls, and the server's
peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.view.browser.conftest import find_chromium
from tests.view.served import serving
from whet.observe.records import read_table
from whet.observe.records.files import INDEX, file_name
from whet.observe.records.index import index_of
from whet.observe.records.schema import SCHEMA, VERSION, VERSION_KEY
from whet.view.lessons import LESSONS
from whet.view.lessons.play import write_example

RESULTS = Path(__file__).parent / "results/viewer.json"
SCROLL = """
(seconds) => new Promise((done) => {
  const box = document.querySelector(".strip");
  const times = [];
  const step = 60;
  const began = performance.now();
  const turn = (now) => {
    times.push(now);
    box.scrollTop += step;
    if (box.scrollTop + box.clientHeight >= box.scrollHeight - 1) box.scrollTop = 0;
    if (now - began < seconds * 1000) requestAnimationFrame(turn);
    else done(times);
  };
  requestAnimationFrame(turn);
})
"""


def long_trajectory(folder: Path, tokens: int) -> None:
    """The research lesson with its first trajectory repeated until it has this many tokens."""
    write_example(folder, LESSONS["research"]["research"])
    path = folder / "rollouts" / file_name(0)
    rows = read_table(path).slice(0, 1).to_pylist(maps_as_pydicts="strict")
    row = rows[0]
    count = len(row["tokens"])
    times = -(-tokens // count)
    for field in SCHEMA:
        if pa.types.is_list(field.type) and isinstance(row[field.name], list) and len(row[field.name]) == count:
            row[field.name] = (row[field.name] * times)[:tokens]
    table = pa.Table.from_pylist(rows, schema=SCHEMA.with_metadata({VERSION_KEY: str(VERSION).encode()}))
    pq.write_table(table, path, compression="lz4")
    pq.write_table(index_of(table, path.name, [1]), folder / "rollouts" / INDEX / path.name)


def long_run(folder: Path, rollouts: int, siblings: int) -> None:
    """Metrics of a line for each rollout, and an index of each; the last rollout's records, too."""
    write_example(folder, LESSONS["two-prompts"]["two-prompts"])
    records = folder / "rollouts"
    base = read_table(records / file_name(0)).to_pylist(maps_as_pydicts="strict")
    shutil.rmtree(records / INDEX)
    (records / INDEX).mkdir()
    random = np.random.default_rng(0)
    size = 8
    rows = [dict(base[i % len(base)]) for i in range(siblings)]
    for i, row in enumerate(rows):
        task = f"train/{i // size}#0"
        row |= {"group": i // size, "task_id": task, "trajectory": f"{task}/{i % size}", "rollout_id": rollouts - 1}
    table = pa.Table.from_pylist(rows, schema=SCHEMA.with_metadata({VERSION_KEY: str(VERSION).encode()}))
    (records / file_name(0)).unlink()
    pq.write_table(table, records / file_name(rollouts - 1), compression="lz4", row_group_size=siblings)
    index = index_of(table, file_name(rollouts - 1), [siblings])
    for rollout in range(rollouts):
        one = index.set_column(0, "rollout_id", pa.array([rollout] * siblings, pa.int64()))
        one = one.set_column(4, "reward", pa.array(random.random(siblings)))
        tasks = [f"train/{(rollout * 64 + i // size) % 7000}#{rollout // 110}" for i in range(siblings)]
        one = one.set_column(2, "task_id", pa.array(tasks))
        if rollout < rollouts - 1:  # the last one's index is that of its records
            one = one.set_column(3, "trajectory", pa.array([f"train/{rollout}-{i // size}#0/{i % size}" for i in range(siblings)]))
        pq.write_table(one, records / INDEX / file_name(rollout), compression="lz4")
    names = [f"part{i // 10}/metric_{i}" for i in range(100)]
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(rollouts):
            line = {"step": step + 1, "reward/total": random.random(), "time/step_s": 3.0, "time/rollout_s": 2.0}
            file.write(json.dumps(line | dict(zip(names, random.random(100).tolist(), strict=True))) + "\n")


def machine() -> str:
    """The processor, with its cores and memory."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB"


def first_paint(browser, address: str, wanted: str) -> float:
    """Seconds from the request until the element that was waited for is painted."""
    context = browser.new_context(viewport={"width": 1360, "height": 900})
    page = context.new_page()
    began = time.perf_counter()
    page.goto(address)
    page.wait_for_selector(wanted)
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    took = time.perf_counter() - began
    context.close()
    return took


def measure_long(browser, folder: Path, tokens: int) -> dict:
    long_trajectory(folder / "long", tokens)
    address = "#/trajectory?" + urlencode({"run": "long", "rollout": 0, "trajectory": "lesson/0#0/0", "token": tokens // 2})
    with serving(folder / "long") as served:
        opened = [first_paint(browser, served.address + address, ".strip .token.chosen") for _ in range(5)]
        page = browser.new_page(viewport={"width": 1360, "height": 900})
        page.goto(served.address + address)
        page.wait_for_selector(".strip .token.chosen")
        times = page.evaluate(SCROLL, 5)
        page.close()
    gaps = np.diff(times)
    return {
        "tokens": tokens,
        "open_s": {"median": statistics.median(opened), "worst": max(opened)},
        "frames_per_second": 1000 * len(gaps) / (times[-1] - times[0]),
        "frame_ms": {"median": float(np.median(gaps)), "p99": float(np.percentile(gaps, 99))},
    }


def measure_wide(browser, folder: Path, rollouts: int, siblings: int) -> dict:
    long_run(folder / "wide", rollouts, siblings)
    began = time.perf_counter()
    with serving(folder / "wide") as served:
        started = time.perf_counter() - began
        views = {
            "runs": ("#/runs", ".chart canvas"),
            "groups_of_a_rollout": (f"#/groups?run=wide&rollout={rollouts - 1}", ".group"),
            "all_groups": ("#/groups?run=wide&rollout=all&sort=changed", ".list tbody tr"),
            "trajectory": (f"#/trajectory?run=wide&rollout={rollouts - 1}&trajectory=train%2F3%230%2F1", ".strip .token"),
        }
        seconds = {name: first_paint(browser, served.address + address, wanted) for name, (address, wanted) in views.items()}
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    size = {"trajectories": rollouts * siblings, "rollouts": rollouts}
    return {**size, "start_s": started, "paint_s": seconds, "server_peak_gib": peak / 2**20}


def main() -> None:
    """Measure, print and write the results."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("rollouts", 1000), ("siblings", 512), ("tokens", 32000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        wide = measure_wide(browser, Path(name), given.rollouts, given.siblings)
        found = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "browser": browser.version, "wide": wide}
        found["long"] = measure_long(browser, Path(name), given.tokens)
        browser.close()
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
