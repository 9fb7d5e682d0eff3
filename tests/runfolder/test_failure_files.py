"""What is kept of a failure in the middle of a run."""

from __future__ import annotations

from whet.runfolder.failures import FailureFiles


def test_each_failure_has_a_file_and_a_line(tmp_path):
    said = []
    files = FailureFiles(tmp_path, lambda: "rollout/engine", said.append)
    for _ in range(2):
        files.write("engine 0", "it died\nits last output:\n    oh", "it is started again", ["r: 3 tokens"], {"engine 1": "Thread 1"})
    first, second = sorted((tmp_path / "failures").iterdir())
    assert [first.name, second.name] == ["1_engine_0.txt", "2_engine_0.txt"]
    text = first.read_text()
    assert "\n\nit died\nits last output:\n    oh\n\nthen: it is started again\n\nphase: rollout/engine\n\n" in text
    assert "\n\nin flight:\n    r: 3 tokens\n\n" in text
    assert "stacks of engine 1:\nThread 1\n\nstacks of this process:\n" in text
    assert "test_each_failure_has_a_file_and_a_line" in text.partition("stacks of this process")[2]
    assert said == [f"it died; it is started again; see {path}" for path in (first, second)]


def test_what_cannot_be_kept_is_said_and_does_no_harm(tmp_path):
    (tmp_path / "failures").write_text("in the way")
    said = []
    FailureFiles(tmp_path, lambda: "", said.append).write("engine 0", "it died", "the run ends", [], {})
    assert said[0].startswith("it died; the run ends; what is known of it cannot be kept: ")
