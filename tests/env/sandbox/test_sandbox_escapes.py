"""No program gets out of a sandbox, on any of the ways to isolate that this machine has."""

import asyncio
import json
import os
import sys

import pytest

from tests.env.sandbox.conftest import LAUNCHES, PLACES, opened, play, program, rung
from tests.reach import open_to_all
from whet.env.build import EnvConfig, build_env_factory
from whet.env.sandbox import open as opening
from whet.env.sandbox import probe
from whet.env.sandbox.base import PathRefused, SandboxRefused
from whet.env.sandbox.holder import HolderRefused

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes of this machine need Linux")


@pytest.mark.parametrize("place", PLACES)
def test_every_attempt_of_the_self_test_is_refused(place):
    try:
        found = asyncio.run(probe.attempts(rung(place)))
    except HolderRefused as refused:
        pytest.skip(str(refused))
    assert len(found) > 30
    assert [name for name, refused in found.items() if not refused] == []


def test_the_self_test_finds_what_is_open(monkeypatch):
    harmless = probe.ATTEMPTS.replace("outside, signal_parent,", "outside,").replace("limits, mount,", "limits,")
    monkeypatch.setattr(probe, "ATTEMPTS", harmless)
    found = asyncio.run(probe.attempts(probe.rung_of("unsafe", probe.Launch())))
    got_through = {name for name, refused in found.items() if not refused}
    assert {"read_outside", "write_outside", "connect_tcp", "send_udp", "connect_unix", "connect_abstract", "signal_outside"} <= got_through


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up rights as Docker does")
def test_where_docker_refuses_namespaces_the_second_way_is_chosen_and_the_first_one_s_fault_is_told():
    choice = probe.choose(launch=LAUNCHES["docker"])
    assert choice.rung.name == "landlock"
    assert "unshare" in choice.found["namespaces"]["fault"] and "unshare" in choice.summary()


def test_where_nothing_isolates_it_refuses_unless_it_is_told_to_go_on(monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "RUNGS", ("neither",))
    launch = probe.Launch(before=("/usr/bin/env",))  # another key of the cache

    async def found(rung):
        return {"read_outside": "refused", "send_udp": ""}

    monkeypatch.setattr(probe, "attempts", found)
    with pytest.raises(SandboxRefused, match="neither: the self-test got through by send_udp"):
        probe.choose(launch=launch)
    choice = probe.choose(unsafe=True, launch=launch)
    assert choice.rung.name == "unsafe" and "without isolation" in choice.summary()
    monkeypatch.setattr(opening, "choose", lambda unsafe: choice)
    opening.record_isolation(tmp_path, build_env_factory(EnvConfig(name="tools", tools=["calculator"])))
    assert not list(tmp_path.iterdir()), "a run without sandboxes has none to tell of"
    opening.record_isolation(tmp_path, build_env_factory(EnvConfig(name="tools", tools=["shell"])))
    assert json.loads((tmp_path / "sandbox.json").read_text())["rung"] == "unsafe"


@pytest.mark.parametrize("place", PLACES)
def test_links_that_a_program_leaves_are_not_followed(place, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    made = program(f"import os; os.symlink('{secret}', 'link'); os.symlink('{tmp_path}', 'folder'); os.mkfifo('pipe')")

    async def run():
        async with opened(place) as sandbox:
            assert (await sandbox.exec(made)).status == 0
            for path in ("link", "folder/secret", "folder/new", "../x", str(secret), "pipe", "", "."):
                with pytest.raises(PathRefused):
                    await sandbox.read(path)
                with pytest.raises(PathRefused):
                    await sandbox.write(path, b"changed")
            with pytest.raises(PathRefused):
                await sandbox.list("folder")
            assert "link@" in await sandbox.list()
            await sandbox.write("deep/er/file", b"\xff")
            assert await sandbox.read("deep/er/file") == b"\xff" and await sandbox.list("deep") == ["er/"]

    asyncio.run(run())
    assert secret.read_text() == "secret" and [path.name for path in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize("place", PLACES)
def test_programs_do_not_have_this_process_s_environment_descriptors_or_user(place, monkeypatch):
    monkeypatch.setenv("WHET_SECRET", "secret")
    text = "import os, json; print(json.dumps([dict(os.environ), os.getuid(), os.getgroups()]))"
    done = play(place, program(text))[0]
    env, uid, groups = json.loads(done.stdout)
    assert set(env) <= set(probe.VARIABLES) and uid != 0 and 0 not in groups


def test_a_folder_of_the_settings_can_be_read_and_not_written(tmp_path):
    (tmp_path / "rows").write_text("rows")
    open_to_all(tmp_path)
    os.chmod(tmp_path, 0o777)
    for place in ("here-namespaces", "here-landlock"):
        write = program(f"open('{tmp_path}/rows', 'a').write('x')")
        done = play(place, program(f"print(open('{tmp_path}/rows').read())"), write, paths=[str(tmp_path)])
        assert done[0].stdout == "rows\n" and done[1].status == 1
    assert (tmp_path / "rows").read_text() == "rows"
