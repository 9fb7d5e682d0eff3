"""What commands say at their end, and the conversations of `whet show`."""

import base64
import re
import zlib

import pytest

from tests.e2e.tiny_run import QUESTIONS, make_files, run_config
from tests.view.packs import read_pack
from whet.cli import main
from whet.config import dump_toml
from whet.runs.commands import train
from whet.runs.show import ShowQuery, chosen_of, chosen_rows, transcripts
from whet.view.notebook import show


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A run's folder, its log, and what it printed."""
    import contextlib
    import io

    folder = tmp_path_factory.mktemp("shown")
    make_files(folder)
    sets = {"before_training": True, "sets": {"test": {"path": str(folder / "train.jsonl")}}}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        train(run_config(folder, "run", evaluate=sets, observe={"display": "plain"}))
    return folder / "run", out.getvalue()


def test_a_command_ends_with_figures_replies_and_what_comes_next(shown):
    run, out = shown
    after = out.partition("the model is in")[2]
    assert re.search(r"reward: 0\.\d+ in the first 2 steps, 0\.\d+ in the last 2", after)
    assert re.search(r"eval/test/mean@1: 0\.\d+ at first, 0\.\d+ at the end", after)
    assert all(re.search(rf"{word} reply: reward 0?\.?\d+.* -> ", after) for word in ("best", "worst", "typical")), after
    assert f"whet show {run}" in after and f"whet serve {run}/model" in after
    assert "reply:" not in (run / "log.txt").read_text(), "the log holds no replies"


def whet(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["whet", *map(str, arguments)])
    try:
        main()
        status = 0
    except SystemExit as end:
        status = end.code
    found = capsys.readouterr()
    return status, found.out, found.err


def test_show_prints_the_best_the_worst_and_a_typical_conversation(shown, monkeypatch, capsys):
    run, _ = shown
    status, out, _ = whet(monkeypatch, capsys, "show", run)
    words = [line.split(":")[0] for line in out.splitlines() if "reward" in line]
    assert (status or 0) == 0 and out.count("\n  user\n") == 3 and words == ["best", "worst", "typical"]
    rewards = [float(found) for found in re.findall(r"reward ([\d.]+)", out)]
    assert rewards[0] >= rewards[2] >= rewards[1]
    _, out, _ = whet(monkeypatch, capsys, "show", run, "--rollout", 0, "--worst", "--tokens")
    assert out.startswith("worst: ") and re.search(r"model, trains, log-prob -\d.*, advantage -?\d.*, version \d", out)
    _, out, _ = whet(monkeypatch, capsys, "show", run / "evaluations/test", "--num", 2)
    assert out.count("\n  user\n") == 2


def test_show_writes_a_page(shown, monkeypatch, capsys, tmp_path):
    run, _ = shown
    status, _, err = whet(monkeypatch, capsys, "show", run, "--html", tmp_path / "x.html")
    assert status == 2 and "3 conversations are chosen, and a page has one: add --best" in err and not (tmp_path / "x.html").exists()
    _, out, _ = whet(monkeypatch, capsys, "show", run, "--worst", "--html", tmp_path / "x.html")
    ((_, rows),) = chosen_rows(run, ShowQuery(worst=True))
    expected = show(run, rows[0]["trajectory"], 3)
    assert (tmp_path / "x.html").read_text() == expected.page and expected.trajectory in out
    _, out, _ = whet(monkeypatch, capsys, "show", run / "evaluations/test", "--num", 1, "--html", tmp_path / "y.html")
    assert "pack-trajectory" in (tmp_path / "y.html").read_text() and out.startswith(str(tmp_path / "y.html"))


def test_a_set_of_an_evaluation_has_the_texts_of_its_run(shown):
    run, _ = shown
    ((_, rows),) = chosen_rows(run / "evaluations/test", ShowQuery(num=1))
    page = show(run / "evaluations/test", rows[0]["trajectory"]).page
    data = zlib.decompress(base64.b64decode(re.search(r'id="pack-trajectory">([^<]*)<', page)[1]))
    head, columns = read_pack(data)
    assert head["config"]["algo"]["name"] == "grpo" and columns["piece_known"].all()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--rollout", 9), "there are no records of rollout 9; there are those of 0 to 3"),
        (("--tool",), "in no conversation of rollout 3 did the model call a tool"),
        (("--task", "train/99"), "no task's id has 'train/99'"),
    ],
)
def test_what_is_not_there_is_said(shown, monkeypatch, capsys, arguments, told):
    status, _, err = whet(monkeypatch, capsys, "show", shown[0], *arguments)
    assert status == 2 and told in err


def test_a_terminal_is_safe_from_what_a_model_wrote(shown):
    _, transcript = transcripts(shown[0], ShowQuery(best=True))[0]
    message = type(transcript.messages[0])("assistant", "\x1b[2J")
    hostile = type(transcript)("x", "completed", 1.0, [message])
    assert "\x1b" not in hostile.as_text()


def test_words_choose_by_reward():
    assert chosen_of([3, 1, 2], ("best", "worst", "typical"), float) == [("best", 3), ("worst", 1), ("typical", 2)]
    assert chosen_of([1, 1], ("best", "worst", "typical"), float) == [("best", 1), ("worst", 1)]
    assert chosen_of(["a", "b"], ("best",), lambda each: None) == [("", "a")]


def test_replies_are_printed_while_a_run_goes_on(tmp_path, monkeypatch, capsys):
    make_files(tmp_path)
    config = run_config(tmp_path, "run", num_rollouts=1, observe={"display": "plain"})
    (tmp_path / "run.toml").write_text(dump_toml(config))
    status, out, err = whet(monkeypatch, capsys, "train", tmp_path / "run.toml", "--show", "2")
    assert not status, err
    printed = re.findall(r"^train/\d#0/\d: reward ([\d.]+).*\n  prompt: (.+)\n  reply: ", out, re.MULTILINE)
    assert len(printed) == 2 and float(printed[0][0]) >= float(printed[1][0]) and printed[0][1] in QUESTIONS
    assert "  reply: " not in (tmp_path / "run/log.txt").read_text(), "the log holds no replies"
