"""Programs in the sandbox: they reach the model, their folder and what was granted, and what they take too much is an outcome."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
from contextlib import aclosing

import pytest

from tests.env.sandbox.conftest import SYSTEM_PYTHON
from tests.env.sandbox.test_sandbox_bombs import SHARED
from tests.fakes import HANG, FakeEngine
from tests.left import Left
from tests.reach import open_to_all
from tests.record.test_program import LIMITS, PARAMS, PROGRAM, TASK, script
from tests.rollout.scripted import RENDERER, run
from whet.config import ConfigError
from whet.env.build import EnvConfig, build_env_factory
from whet.env.deadline import Deadline
from whet.env.resources import Resources
from whet.env.rollout import TrajectoryRun
from whet.env.sandbox import open as opening
from whet.env.sandbox.base import SandboxFailed, SandboxRefused
from whet.env.sandbox.config import SandboxConfig
from whet.env.sandbox.holder import Launch
from whet.env.sandbox.inside.rooms import _unused
from whet.env.sandbox.needed import needed_by
from whet.env.sandbox.probe import Isolation, attempts, rung_of
from whet.record.command import FLOOD_BYTES
from whet.types import Outcome

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes of this machine need Linux")
ASKS = PROGRAM.replace("sys.exit", "report(); sys.exit")
SMALL = SandboxConfig(memory_mb=128, max_processes=16, disk_mb=4)


def factory(text, limits=SMALL, python=sys.executable, **options):
    return build_env_factory(EnvConfig(name="program", options={"command": [python, "-c", text], **options}, sandbox=limits))


def played(make, engine=None, timeout_s=None):
    """The trajectory, with nothing left of it."""
    before = Left()
    engine = engine or FakeEngine(script("36"))

    async def main():
        async with aclosing(Resources()) as resources:
            own = resources.of_group(TASK).of_trajectory()

            async def open_env():
                return make(**await own.open(make.needs))

            made = TrajectoryRun("t/0", TASK, engine, RENDERER, PARAMS, LIMITS, deadline=Deadline.after(timeout_s))
            return await made.to_end(open_env)

    trajectory = run(main())
    engine.check_idle()
    before.check()
    return trajectory


@pytest.fixture(params=["namespaces", "landlock"])
def rung(request, monkeypatch):
    """A way to isolate, and the interpreter that programs in it can run."""
    found = rung_of(request.param, Launch())
    try:
        tried = asyncio.run(attempts(found))
    except SandboxFailed as fault:
        pytest.skip(f"this machine has no {request.param}: {fault}")
    monkeypatch.setattr(opening, "choose", lambda unsafe: Isolation(found, {request.param: tried}))
    return found


CERTIFIED = """
import os, ssl, sys
ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE"))  # as clients do
report = lambda: None
"""


def test_no_certificates_are_named_that_a_program_cannot_read(rung, monkeypatch, tmp_path):
    (tmp_path / "ca.pem").write_text("")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    trajectory = played(factory(CERTIFIED + ASKS, python=SYSTEM_PYTHON, score="file"))
    assert (trajectory.outcome, trajectory.turns[-1].reward) == (Outcome.COMPLETED, 0.25), trajectory.error


TRIES = """
import socket
def report():
    found = {}
    for name, attempt in {
        "read": lambda: open(SECRET).read(),
        "list": lambda: os.listdir(os.path.dirname(SECRET)).index("secret"),
        "write": lambda: open(GRANTED, "a"),
        "connect": lambda: socket.create_connection(("127.0.0.1", PORT), timeout=5),
        "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    }.items():
        try:
            attempt()
        except (OSError, ValueError):
            continue
        found[name] = True
    print(json.dumps([found, open(GRANTED).read(), os.getcwd() == os.environ["HOME"], os.getuid()]))
"""


def test_a_program_reaches_the_model_and_what_it_was_given_alone(rung, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "s")
    granted = tmp_path / "granted"
    granted.mkdir()
    open_to_all(tmp_path)
    (granted / "rows").write_text("rows")
    (tmp_path / "secret").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as other:
        places = {"SECRET": str(tmp_path / "secret"), "GRANTED": str(granted / "rows"), "PORT": other.getsockname()[1]}
        text = "import os, json\n" + "".join(f"{name} = {value!r}\n" for name, value in places.items()) + TRIES + ASKS
        python = sys.executable if rung.name == "namespaces" or os.geteuid() else SYSTEM_PYTHON
        make = factory(text, SMALL.model_copy(update={"paths": (str(granted),)}), python, score="file")
        trajectory = played(make)
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    assert trajectory.turns[-1].reward == 0.25
    found, rows, at_home, uid = json.loads(trajectory.turns[-1].notes[-1].attachments["stdout"].splitlines()[-1])
    assert found == {} and rows == "rows" and at_home and uid != 0
    assert opening.chosen(make).rung.name == rung.name, "the run's folder tells of it"


BOMBS = {
    "memory_mb": SHARED,
    "disk_mb": "for n in range(40):\n  with open(f'f{n}', 'wb') as f: f.write(bytes(1 << 20))\nimport time; time.sleep(60)",
    "output": f"import sys\nfor _ in range({(FLOOD_BYTES >> 16) + 64}): sys.stdout.write('x' * 65536)\nimport time; time.sleep(60)",
}


@pytest.mark.parametrize("what", list(BOMBS))
def test_a_program_that_takes_too_much_is_an_outcome_that_names_the_limit(rung, what):
    if what == "disk_mb" and rung.name == "namespaces":
        pytest.skip("there, a write fails")
    trajectory = played(factory(BOMBS[what], python=SYSTEM_PYTHON or sys.executable, score="exit"), timeout_s=60)
    assert (trajectory.outcome, trajectory.error.kind) == (Outcome.ENV_ERROR, "ProgramEnded"), trajectory.error
    words = {"output": "it wrote too much output, over 32 MiB", "disk_mb": r"to the disk \(env.sandbox.disk_mb = 4\)"}
    assert re.search(words.get(what, r"it took too much memory \(env.sandbox.memory_mb = 128\)"), trajectory.error.message)


LEAVES = """
import os, subprocess, sys
for own in (True, False):
    subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"], start_new_session=own)
"""


def test_all_that_a_program_started_ends_with_it_and_its_time_is_the_trajectory_s(rung):
    engine = FakeEngine(lambda request: [*((token, -0.5) for token in RENDERER.encode("The answer")), HANG])
    text, python = LEAVES + PROGRAM, sys.executable if rung.name == "namespaces" or os.geteuid() else SYSTEM_PYTHON
    assert played(factory(LEAVES + PROGRAM, python=python)).outcome is Outcome.COMPLETED
    trajectory = played(factory(text, python=python), engine, 3)
    assert trajectory.outcome is Outcome.TIMEOUT
    assert tuple(trajectory.turns[0].tokens) == RENDERER.encode("The answer"), "what was sampled is kept"


def test_a_program_behind_links_runs_and_reads_the_files_that_its_variables_name(tmp_path, monkeypatch):
    (tmp_path / "environment").symlink_to(sys.prefix)
    settings = tmp_path / "settings"
    settings.write_text("settings")
    monkeypatch.setenv("SETTINGS", str(settings))
    text = f"import os\nassert open(os.environ['SETTINGS']).read() == 'settings'\n{PROGRAM}"
    try:
        trajectory = played(factory(text, python=str(tmp_path / "environment/bin/python"), score="file", variables=["SETTINGS"]))
    except ConfigError as refused:
        pytest.skip(f"other users cannot read this interpreter: {refused}")
    assert (trajectory.outcome, trajectory.turns and trajectory.turns[-1].reward) == (Outcome.COMPLETED, 0.25), trajectory.error


@pytest.mark.parametrize(
    ("options", "sandbox", "words"),
    [
        ({}, {"kind": "docker", "at": "python"}, "run in sandboxes of this machine, not in those of env.sandbox.kind='docker'"),
        ({"command": ["no-such-program"]}, {}, "there is no program 'no-such-program'"),
    ],
)
def test_what_cannot_run_in_a_sandbox_is_refused_when_the_run_is_built(options, sandbox, words):
    with pytest.raises(ConfigError, match=f"{words}; env.options.sandbox=false runs the program without isolation"):
        factory("", SandboxConfig(**sandbox), **options)


def test_a_machine_that_cannot_isolate_refuses_a_program_unless_it_is_told_to_go_without(monkeypatch):
    def choose(unsafe):
        raise SandboxRefused("env.sandbox: nothing on this machine isolates")

    monkeypatch.setattr(opening, "choose", choose)
    with pytest.raises(ConfigError, match=r"nothing on this machine isolates; env\.options\.sandbox=false"):
        factory(PROGRAM)
    make = factory(PROGRAM, sandbox=False)
    assert opening.chosen(make) is None


def test_what_a_command_needs_is_its_program_its_interpreter_and_the_files_that_it_names(tmp_path, monkeypatch):
    (tmp_path / "lib/node_modules/agent").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    node, script_file, python = tmp_path / "bin/node", tmp_path / "lib/node_modules/agent/cli.js", tmp_path / "other/run"
    node.write_bytes(b"\x7fELF")
    script_file.write_text("#!/usr/bin/env node\n")
    python.parent.mkdir()
    python.write_text(f"#!{sys.executable} -I\n")
    for file in (node, script_file, python):
        file.chmod(0o755)
    (tmp_path / "bin/agent").symlink_to(script_file)
    settings = tmp_path / "settings.json"
    settings.write_text("{}")
    command, paths = needed_by(["agent", str(settings), str(tmp_path), "/no/such"], {"PATH": f"{tmp_path}/bin:/usr/bin"})
    assert command[0] == f"{tmp_path}/bin/agent"
    assert {str(settings), str(tmp_path), str(script_file)} <= {*paths, str(tmp_path)} and str(tmp_path) in paths
    command, paths = needed_by([str(python), str(tmp_path)], {"PATH": "/usr/bin"})
    assert command == (str(python), str(tmp_path)) and sys.prefix in paths and sys.base_prefix in paths and str(python) in paths
    assert str(tmp_path) not in paths and "/" not in paths, "folders that an argument names are not granted"
    with pytest.raises(ValueError, match="there is no program 'agent'"):
        needed_by(["agent"], {"PATH": "/usr/bin"})


def test_the_folder_of_programs_is_where_nothing_is_to_be_read():
    assert _unused("/work", ["/usr/work", "/works"]) == "/work"
    assert _unused("/work", ["/work/a", "/work2"]) == "/work3"
