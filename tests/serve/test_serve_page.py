"""What docs/serve.md shows is run here."""

import re
import shlex
from pathlib import Path

import pytest

from whet.config import load_config
from whet.serve.app import CHANGE, COUNT, GENERATE, READ
from whet.serve.settings import ServeConfig, ServerLimits

PAGE = (Path(__file__).resolve().parents[2] / "docs/serve.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("word", ["from openai import", "from urllib.request import"])
def test_the_programs_run(server, word, capsys):
    (program,) = [block for block in PYTHON if word in block]
    exec(compile(program.replace("http://127.0.0.1:8000", server.url), "docs/serve.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_the_commands_settings_exist():
    lines = [shlex.split(line) for line in PAGE.splitlines() if line.startswith("whet serve ")]
    assert len(lines) == 3
    for line in lines:
        load_config(ServeConfig, None, [f"model.path={line[2]}", *(word for word in line if "=" in word)])


def test_every_route_and_limit_is_on_the_page():
    for path in (*GENERATE, *COUNT, *READ, *CHANGE):
        assert re.search(rf"`(GET |POST )?{re.escape(path)}`", PAGE), path
    for name, field in ServerLimits.model_fields.items():
        assert f"| `limits.{name}` | {field.default} |" in PAGE
