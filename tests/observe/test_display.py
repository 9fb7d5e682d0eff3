import io
import re
import sys

import pytest
from rich.console import Console

from whet.observe.build_display import build_display
from whet.observe.display import (
    Headline,
    Pace,
    PlainDisplay,
    QuietDisplay,
    duration_text,
    printable,
    say,
    seconds_text,
)
from whet.observe.live import LiveDisplay

HEADLINES = [
    Headline("reward/mean", "reward", ".2f"),
    Headline("absent", "absent"),
    Headline("length/mean", "len", ".1f"),
    Headline("kl", "kl", ".4f"),
]
VALUES = {
    "time/rollout_s": 0.54,
    "time/rollout/engine_s": 0.5,
    "time/update_s": 0.41,
    "time/other_s": 0.05,
    "time/step_s": 1.0,
    "kl": 0.0011,
    "reward/mean": 0.4123,
    "length/mean": 37.2,
}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def plain(clock):
    return PlainDisplay(HEADLINES, out=io.StringIO(), err=io.StringIO(), clock=clock)


@pytest.fixture
def live(clock):
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    display = LiveDisplay(HEADLINES, console, clock)
    yield display
    display.close()


def drawn(display):
    """The panel as it is now, without borders."""
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(display.render())
    return [line.strip("│╭╮╰╯─ ") for line in console.file.getvalue().splitlines()]


def test_plain_says_what_runs_and_then_one_line_per_step(plain, clock):
    plain.start("whet quickstart", 300, {"model": "tiny", "device": "cpu"})
    clock.now += 0.98
    plain.phase("rollout")
    plain.step(11, VALUES)
    clock.now += 1.18
    plain.step(12, VALUES)
    plain.note("saved")
    assert plain._out.getvalue().splitlines() == [
        "whet quickstart",
        "  model   tiny",
        "  device  cpu",
        "step  11/300  reward 0.41  len 37.2  kl 0.0011  0.98 s (rollout 54%, update 41%)  eta 4m43s",
        "step  12/300  reward 0.41  len 37.2  kl 0.0011  1.2 s (rollout 54%, update 41%)  eta 5m11s",
        "saved",
    ]
    assert plain._err.getvalue() == ""


def test_a_line_has_only_what_the_step_has(plain, clock):
    plain.start("sft", 5, {})
    clock.now += 2.0
    plain.step(5, {"kl": 0.5})
    assert plain._out.getvalue() == "sft\nstep 5/5  kl 0.5000  2.0 s  eta 0s\n"


def test_a_line_names_the_largest_phase_even_where_all_are_small(plain):
    plain.start("x", 1, {})
    plain.step(1, {f"time/phase{i}_s": 1.0 + i / 100 for i in range(12)})
    assert "(phase11 9%)" in plain._out.getvalue()


def test_a_new_part_of_the_run_starts_its_own_pace(plain, clock):
    plain.start("sft", 2, {})
    clock.now += 100.0
    plain.step(1, {})
    plain.start("grpo", 3, {})
    clock.now += 2.0
    plain.step(1, {})
    assert plain._out.getvalue().splitlines()[-1] == "step 1/3  2.0 s  eta 4s"


def test_plain_table(plain):
    plain.table("Accuracy", ["set", "before", "n"], [["held-out", 0.41, 500], ["gsm8k", None, 50], ["x", 2 / 3, 1319]])
    assert plain._out.getvalue().splitlines() == [
        "Accuracy",
        "  set       before     n",
        "  --------  ------  ----",
        "  held-out    0.41   500",
        "  gsm8k               50",
        "  x         0.6667  1319",
    ]
    with pytest.raises(ValueError, match="table 'Accuracy': row 0 has 1 cells for 2 columns"):
        plain.table("Accuracy", ["a", "b"], [["x"]])


def test_warnings_go_to_standard_error(plain, capsys):
    plain.warn("reward is constant")
    assert plain._err.getvalue() == "warning: reward is constant\n" and plain._out.getvalue() == ""
    quiet = QuietDisplay()
    quiet.start("x", 1, {})
    quiet.phase("rollout")
    quiet.step(1, VALUES)
    quiet.table("t", ["a"], [])
    quiet.note("n")
    quiet.warn("w")
    quiet.close()
    assert capsys.readouterr() == ("", "warning: w\n")


def test_pace_is_the_moving_mean_of_the_last_steps(clock):
    pace = Pace(100, clock)
    assert pace.eta_s is None and pace.split() == []
    clock.now += 1000.0
    pace.step(1, {"time/setup_s": 1000.0})
    for done in range(2, 22):
        clock.now += 2.0
        pace.step(done, {"time/rollout_s": 0.5, "time/update_s": 1.5, "time/step_s": 2.0})
    assert pace.step_s == 2.0
    assert pace.eta_s == 158.0  # 79 steps of 2 s: the slow first one has left the window
    assert pace.split() == [("update", 0.75), ("rollout", 0.25)]


def test_pace_of_the_last_step_alone(clock):
    pace = Pace(2, clock)
    pace.step(1, {"time/rollout_s": 1.0})
    pace.step(2, {"time/rollout_s": 1.0, "time/update_s": 3.0})
    assert pace.split(num_steps=1) == [("update", 0.75), ("rollout", 0.25)]
    assert pace.split() == [("update", 0.6), ("rollout", 0.4)]
    assert pace.eta_s == 0.0


def test_a_time_within_a_phase_is_not_counted_beside_it(clock):
    pace = Pace(1, clock)
    pace.step(1, {"time/rollout_s": 1.0, "time/engine_busy_s": 0.9, "time/update_s": 3.0, "time/compile_s": 2.0, "time/step_s": 4.0})
    assert pace.split() == [("update", 0.75), ("rollout", 0.25)]


def test_the_panel_shows_progress_phase_bottleneck_and_headlines(live, clock):
    live.start("whet quickstart", 300, {"model": "tiny model", "device": "cpu"})
    for step in range(1, 13):
        clock.now += 1.08
        live.step(step, VALUES)
    live.phase("rollout/engine")
    clock.now += 65.0
    title, run, step, *rest, phase, split, metrics, _ = drawn(live)
    assert title.startswith("whet quickstart")
    assert run == "run      model tiny model  device cpu"
    assert step.endswith("12/300  elapsed 1m18s  1.1 s a step  eta 5m11s")
    assert rest == []
    assert phase == "phase    rollout/engine (1m05s)"
    assert split == "time     rollout 54%  update 41%  other 5%  bottleneck: rollout"
    assert metrics == "metrics  reward 0.41  len 37.2  kl 0.0011"


def test_a_line_of_the_panel_breaks_between_pairs_only(live):
    names = ("one", "flat groups", "cut", "mismatch", "entropy")
    for width in range(40, 81):
        facts = {name: f"value-{i}" for i, name in enumerate(names)}
        live.start("grpo", 1, facts)
        console = Console(file=io.StringIO(), width=width, color_system=None)
        console.print(live.render())
        lines = [line.strip("│ ").removeprefix("run").strip() for line in console.file.getvalue().splitlines()[1:-1]]
        shown = [line for line in lines if "value" in line or any(name in line for name in names)]
        assert "  ".join(shown) == "  ".join(f"{name} {value}" for name, value in facts.items())
        assert all(re.search(r"value-\d$", line) for line in shown)


def test_the_panel_before_the_first_step_has_no_estimate(live):
    live.start("grpo", 300, {})
    assert [line.split() for line in drawn(live)[1:-1]] == [["step", "0/300", "elapsed", "0s"]]


def test_the_live_display_writes_notes_tables_and_its_last_panel(live, clock):
    live.start("grpo", 2, {})
    clock.now += 1.0
    live.step(1, VALUES)
    live.note("saved [bold]here[/bold]")
    live.warn("slow [/]")
    live.table("Accuracy", ["set", "after"], [["held-out", 0.8125]])
    live.close()
    live.close()
    written = live._console.file.getvalue()
    assert "saved [bold]here[/bold]" in written and "warning: slow [/]" in written
    assert "held-out" in written and "0.8125" in written
    assert "1/2" in written.rpartition("╭")[2] and written.endswith("\x1b[?25h")  # the cursor is back


def test_what_a_model_wrote_cannot_steer_the_terminal(plain, live):
    attack = "a\x1b[2Jb\r\x07\x9b\u202ec\ud800"
    assert printable(attack) == "a\\x1b[2Jb\\r\\x07\\x9b\\u202ec\\ud800"
    assert printable("né 数\u3000学\u00a0🙂\n\t") == "né 数\u3000学\u00a0🙂\n\t"
    plain.start(attack, 1, {attack: attack})
    plain.note(attack)
    plain.warn(attack)
    plain.table(attack, [attack], [[attack]])
    assert not set("\x1b\r\x07\x9b\u202e") & set(plain._out.getvalue() + plain._err.getvalue())
    live.note(attack)
    live.warn(attack)
    live.table(attack, [attack], [[attack]])
    assert not set("\x1b\r\x07\x9b\u202e") & set(live._console.file.getvalue())
    live.start(attack, 1, {attack: attack})
    live.phase(attack)
    assert "\x1b[2J" not in live._console.file.getvalue() and not set("\x1b\r\u202e") & set("".join(drawn(live)))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (312, "5m12s"), (3599.7, "1h00m"), (7500, "2h05m")]
)
def test_duration(seconds, text):
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.004, "0.00 s"), (0.994, "0.99 s"), (0.996, "1.0 s"), (59.9, "59.9 s"), (59.96, "1m00s"), (75, "1m15s")],
)
def test_step_seconds(seconds, text):
    assert seconds_text(seconds) == text


def test_the_display_follows_the_terminal_and_the_setting(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert type(build_display("auto", HEADLINES)) is PlainDisplay
    assert type(build_display("rich", HEADLINES)) is LiveDisplay
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert type(build_display("auto", HEADLINES)) is LiveDisplay
    assert type(build_display("plain", HEADLINES)) is PlainDisplay
    assert type(build_display("none", HEADLINES)) is QuietDisplay
    monkeypatch.setenv("TERM", "dumb")
    assert type(build_display("auto", HEADLINES)) is PlainDisplay


def test_letters_that_a_stream_lacks_are_spelled_out():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    for text in ("dé", "a\u21b5b \U0001f600"):
        say(text, stream)
    assert stream.buffer.getvalue() == b"d\xe9\na\\u21b5b \\U0001f600\n"
