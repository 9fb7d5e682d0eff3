import importlib.util
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from whet.config import resolve
from whet.runfolder.frames import frames_of, in_user_code

SECRET = "how many apples has Tom"


@pytest.fixture
def module(tmp_path):
    """A user's module: `name` -> the loaded module of that source."""

    def load(source: str, name: str = "their_code"):
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded

    return load


def text_of(work, *arguments) -> str:
    with pytest.raises(BaseException) as caught:
        work(*arguments)
    return "".join(traceback.format_exception(caught.value))


def test_frames_and_types_stay_messages_go(module, tmp_path):
    theirs = module(
        "def score(reply):\n    return inner(reply)\n\n\ndef inner(reply):\n    raise ValueError(f'bad {reply}\\nand {reply}')\n"
    )
    text = text_of(theirs.score, SECRET)
    assert text.count(SECRET) == 2
    file = tmp_path / "their_code.py"
    assert frames_of(text)[-5:] == [
        f'  File "{file}", line 2, in score',
        "    return inner(reply)",
        f'  File "{file}", line 6, in inner',
        "    raise ValueError(f'bad {reply}\\nand {reply}')",
        "ValueError",
    ]


def test_causes_and_contexts_keep_their_order(module):
    theirs = module(
        "def score(reply):\n    try:\n        int(reply)\n    except ValueError as error:\n        raise RuntimeError(reply) from error\n"
        "\n\ndef twice(reply):\n    try:\n        int(reply)\n    except ValueError:\n        raise KeyError(reply)\n"
    )
    frames = frames_of(text_of(theirs.score, SECRET))
    assert [line for line in frames if not line.startswith(" ")] == [
        "ValueError",
        "The above exception was the direct cause of the following exception:",
        "RuntimeError",
    ]
    frames = frames_of(text_of(theirs.twice, SECRET))
    assert [line for line in frames if not line.startswith(" ")] == [
        "ValueError",
        "During handling of the above exception, another exception occurred:",
        "KeyError",
    ]


def test_exception_groups_keep_their_parts(module):
    theirs = module(
        "def part(reply):\n    raise ValueError(reply)\n\n\ndef score(reply):\n    try:\n        part(reply)\n"
        "    except ValueError as error:\n        raise ExceptionGroup(reply, [error])\n"
    )
    frames = frames_of(text_of(theirs.score, SECRET))
    assert SECRET not in "\n".join(frames)
    assert {"ValueError", "ExceptionGroup", "    raise ValueError(reply)"} <= set(frames)


def test_a_traceback_inside_a_message_is_kept_only_where_files_bear_it_out(module, tmp_path):
    """What a program that a model wrote left on its standard error looks like frames; its source is a reply."""
    written = tmp_path / "gone.py"
    written.write_text(f"secret = {SECRET!r}; 1 / 0  # {SECRET}\n")
    run = subprocess.run([sys.executable, str(written)], capture_output=True, text=True, timeout=60, check=False)
    assert SECRET in run.stderr and "ZeroDivisionError" in run.stderr
    written.unlink()
    theirs = module("def step(output):\n    raise RuntimeError('the program failed: ' + output)\n")
    frames = frames_of(text_of(theirs.step, run.stderr))
    assert frames[-3:] == [
        f'  File "{tmp_path / "their_code.py"}", line 2, in step',
        "    raise RuntimeError('the program failed: ' + output)",
        "RuntimeError",
    ]
    assert "gone.py" not in "\n".join(frames) and SECRET not in "\n".join(frames)


@pytest.mark.parametrize(
    "forged",
    [
        f'  File "{__file__}", line 1, in f\n    {SECRET}',
        f'  File "{SECRET}.py", line 1, in f\n    import importlib.util',
        f'  File "{__file__}", line 1, in {SECRET}\n    import importlib.util',
        f'  File "{__file__}", line 999999, in f\n',
        f"ValueError: {SECRET}",
        f"{SECRET}: x",
    ],
)
def test_a_message_cannot_forge_a_frame(forged):
    assert frames_of(f"Traceback (most recent call last):\n{forged}\n{forged}\n") == []


def test_a_type_that_follows_no_frame_is_dropped_with_its_joining_words():
    words = "During handling of the above exception, another exception occurred:"
    line = Path(__file__).read_text().splitlines()[0]
    frame = f'  File "{__file__}", line 1, in f\n    {line}'
    text = f"ValueError: {SECRET}\n\n{words}\n\nTraceback (most recent call last):\n{frame}\nKeyError: {SECRET}\n\n{words}\n"
    assert frames_of(text) == [f'  File "{__file__}", line 1, in f', f"    {line}", "KeyError"]


def without_this_frame(error: BaseException) -> BaseException:
    """As it would be had whet's own code caught it."""
    return error.with_traceback(error.__traceback__.tb_next)


def test_errors_of_whet_alone_are_no_user_code():
    with pytest.raises(ValueError) as caught:
        resolve("no.colon", kind="reward")
    assert in_user_code(caught.value), "this test's frame"
    error = without_this_frame(caught.value)
    for part in (error.__cause__, error.__context__):
        assert part is None or not in_user_code(part)
    assert not in_user_code(error)


def test_users_frames_and_users_causes_are_user_code(module):
    theirs = module("def score(reply):\n    raise ValueError(reply)\n")
    try:
        theirs.score(SECRET)
    except ValueError as error:
        assert in_user_code(without_this_frame(error))
        wrapped = RuntimeError("x")
        assert not in_user_code(wrapped)
        wrapped.__cause__ = error
        assert in_user_code(wrapped)
        assert in_user_code(ExceptionGroup("x", [error]))
    loop = ValueError("a")
    loop.__context__ = KeyError("b")
    loop.__context__.__context__ = loop
    assert not in_user_code(loop)
