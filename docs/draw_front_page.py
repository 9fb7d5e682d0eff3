"""Draws the two pictures of docs/quickstart.md, docs/pictures/learning.svg and terminal.svg, from the folder of a quickstart.

    whet quickstart --seed 0
    python docs/draw_front_page.py runs/quickstart-seed0 [FOLDER FOR THE PICTURES]
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from whet.build.programs import RL_HEADLINES
from whet.observe.live import LiveDisplay
from whet.quickstart.run import show

COLUMNS = 100
"""Characters of a line of the terminal."""
MEAN_OVER = 10
"""Rollouts that the curve's line is a mean of."""
WIDTH, HEIGHT = 900, 480
LEFT, RIGHT, TOP, BOTTOM = 78, 822, 92, 382
"""Edges of the curve's axes."""
GREY, DARK, BLUE, RED = "#6e7781", "#1f2328", "#0969da", "#bc4c00"
WINDOW = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: ui-sans-serif, Arial, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main(run: Path, pictures: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    rows = json_lines(run / "rl/metrics.jsonl")
    start = json_lines(run / "rl/starts.jsonl")[-1]
    pictures.mkdir(parents=True, exist_ok=True)
    (pictures / "learning.svg").write_text(learning(summary, rows, start, tomllib.loads((run / "rl/config.toml").read_text())))
    (pictures / "terminal.svg").write_text(terminal(run, summary, rows, start["command"]))


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def learning(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], start: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Reward by rollout, its moving mean, and the held-out accuracy before and after."""
    rewards = [row["reward/total"] for row in rows if "reward/total" in row]
    last = len(rewards)
    batch = config["batch"]

    def at(rollout: float, share: float) -> tuple[float, float]:
        return LEFT + (RIGHT - LEFT) * rollout / last, BOTTOM - (BOTTOM - TOP) * share

    parts = [
        f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="10" fill="#ffffff" stroke="#d0d7de" />',
        words(LEFT, 38, "Share of problems answered right", DARK, 21, weight="bold"),
        f'<circle cx="{LEFT + 6}" cy="61" r="4" fill="{BLUE}" fill-opacity="0.35" />',
        words(LEFT + 18, 66, "one rollout", GREY),
        f'<path d="M{LEFT + 122} 61 h26" stroke="{BLUE}" stroke-width="3" />',
        words(LEFT + 156, 66, f"mean of {MEAN_OVER} rollouts", GREY),
        f'<circle cx="{LEFT + 330}" cy="61" r="7" fill="{RED}" />',
        words(LEFT + 344, 66, "held-out problems, temperature 0", GREY),
    ]
    for tick in range(0, 11, 2):
        _, y = at(0, tick / 10)
        parts.append(f'<path d="M{LEFT} {y:.1f} H{RIGHT}" stroke="#d8dee4" />')
        parts.append(words(LEFT - 12, y + 5, f"{tick / 10:.1f}", GREY, anchor="end"))
    for rollout in sorted({round(last * quarter / 4) for quarter in range(5)}):
        x, _ = at(rollout, 0)
        parts.append(f'<path d="M{x:.1f} {BOTTOM} v6" stroke="{GREY}" />')
        parts.append(words(x, BOTTOM + 24, str(rollout), GREY, anchor="middle"))
    for i, reward in enumerate(rewards, 1):
        x, y = at(i, reward)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{BLUE}" fill-opacity="0.35" />')
    if last >= MEAN_OVER:
        means = [(i, sum(rewards[i - MEAN_OVER : i]) / MEAN_OVER) for i in range(MEAN_OVER, last + 1)]
        line = " ".join("{:.1f},{:.1f}".format(*at(*mean)) for mean in means)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="3" stroke-linejoin="round" />')
    for rollout, key, anchor, right, down in ((0, "accuracy_warmup", "start", 12, 34), (last, "accuracy_rl", "end", 8, -18)):
        x, y = at(rollout, summary[key])
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="{RED}" stroke="#ffffff" stroke-width="2" />')
        parts.append(words(x + right, y + down, f"{summary[key]:.3f}", RED, 22, weight="bold", anchor=anchor, halo=True))
    each = f"{batch['prompts_per_rollout']} problems with {batch['samples_per_prompt']} replies each"
    parts.append(words((LEFT + RIGHT) / 2, BOTTOM + 50, f"rollouts of GRPO, {each}", DARK, 16, anchor="middle"))
    cpu, day = start["environment"]["cpu"], time.strftime("%Y-%m-%d", time.gmtime(start["time"]))
    told = f"{start['command']}, {cpu['model']}, {cpu['threads']} of {cpu['cores']} cores, {day}"
    parts.append(words((LEFT + RIGHT) / 2, BOTTOM + 78, told, GREY, 14, anchor="middle"))
    return "\n".join([f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg">', *parts, "</svg>\n"])


def words(
    x: float, y: float, text: str, colour: str, size: int = 15, weight: str = "normal", anchor: str = "start", halo: bool = False
) -> str:
    """A line of text; `halo` keeps it readable on what lies behind it."""
    behind = ' stroke="#ffffff" stroke-width="5" paint-order="stroke" stroke-linejoin="round"' if halo else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"{behind} '
        f'font-family="ui-sans-serif, Arial, \'DejaVu Sans\', sans-serif">{escape(text)}</text>'
    )


def terminal(run: Path, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], command: str) -> str:
    """What a terminal shows at the end: the panel of the reinforcement learning, and the results."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(panel(rows, (run / "rl/log.txt").read_text()))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        show(summary, run)
    told = printed.getvalue().replace(str(run), summary["run_dir"])
    for line in told.splitlines():
        for i in range(0, max(len(line), 1), COLUMNS):
            console.print(Text(line[i : i + COLUMNS], no_wrap=True))
    picture = console.export_svg(title=command, code_format=WINDOW, unique_id="whet")
    return "\n".join(line.rstrip() for line in picture.splitlines()) + "\n"


def panel(rows: Sequence[Mapping[str, Any]], log: str) -> Any:
    """The panel as the run left it, by the clock of its metrics."""
    found = re.search(r"info    (whet train: [^\n]+)\n((?:      [^\n]+\n)+)", log)
    assert found is not None, "the log does not say where the reinforcement learning begins"
    facts = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in found[2].splitlines())
    steps = [row for row in rows if "time/step_s" in row]
    now = steps[0]["time"] - steps[0]["time/step_s"]
    display = LiveDisplay(RL_HEADLINES, Console(file=io.StringIO()), clock=lambda: now)
    display.start(found[1], len(steps), facts)
    for row in steps:
        now = row["time"]
        display.step(row["step"], row)
    now = rows[-1]["time"]
    display.phase("save")
    drawn = display.render()
    display.close()
    return drawn


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent / "pictures")
