"""Programs that take too much: each is ended, and the sandbox goes on."""

import asyncio
import os
import sys
import time
import uuid

import pytest

from tests.env.sandbox.conftest import PLACES, SMALL, opened, play, program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes of this machine need Linux")
MARK = f"# {uuid.uuid4().hex}"
"""In the command line of this module's programs: other tests have sandboxes of theirs."""
FORKS = """
import os, time
done, end = 0, time.monotonic() + 5
while done < 7 and time.monotonic() < end:
    try:
        os.fork()
        done += 1
    except OSError:
        pass
time.sleep(max(0, end - time.monotonic()))
"""
"""At most 128 processes for five seconds, even where nothing holds them."""
DAEMON = """
import os, sys, time
for _ in range(2):
    if os.fork():
        os._exit(0)
    os.setsid()
open('pid', 'w').write(open('/proc/self/stat').read().split()[0] if os.path.exists('/proc/self/stat') else str(os.getpid()))
time.sleep(1000)
"""
DEEP = "import os\nfor _ in range(3000):\n  os.mkdir('d'); os.chdir('d')"
MANY = (
    "n = 0\ntry:\n  while n < 20000:\n    open(f'f{n}', 'w').close(); n += 1\nexcept OSError: pass\n"
    "import time; time.sleep(0.3)\nprint(n)"
)
FILL = "for n in range(40):\n  with open(f'f{n}', 'wb') as f: f.write(bytes(1 << 20))\nimport time; time.sleep(1)"
SHARED = (
    "import mmap, time\n"
    "m = mmap.mmap(-1, 400 << 20)\nfor n in range(400): m[n << 20 : (n + 1) << 20] = b'x' * (1 << 20)\ntime.sleep(2)"
)
FLOOD = "for _ in range(20000): print('x' * 10000)"
BOMBS = {"forks": FORKS, "daemon": DAEMON, "deep": DEEP, "many": MANY, "fill": FILL, "shared": SHARED, "flood": FLOOD}


def marked(text):
    return program(f"{MARK}\n{text}")


def processes():
    """Command lines of every process, but for threads of the kernel."""
    found = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                found[pid] = file.read()
        except OSError:
            continue
    return found


def ended_all(holders):
    """Whether every holder, and every program of this module, ends within ten seconds."""

    def left():
        return [line for pid, line in processes().items() if MARK in line or (int(pid) in holders and "whet.env.sandbox.inside" in line)]

    end = time.monotonic() + 10
    while left() and time.monotonic() < end:
        time.sleep(0.05)
    return not left()


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
def test_bombs_are_ended_and_nothing_of_them_is_left(place):
    descriptors, holders = len(os.listdir("/proc/self/fd")), []

    async def run():
        async with opened(place) as sandbox:
            holders.append(sandbox._holder.pid)
            ended = {}
            for name, text in BOMBS.items():
                done = await sandbox.exec(marked(text), timeout_s=1.5 if name == "forks" else 15)
                ended[name] = done
                assert (await sandbox.exec(["sh", "-c", "echo on"])).stdout == "on\n", name
                await sandbox.exec(["sh", "-c", "rm -rf d f*"])
            return ended

    ended = asyncio.run(run())
    assert ended["forks"].reason in ("time", "processes", "memory")
    assert ended["daemon"].status == 0
    assert ended["flood"].reason == "output" and len(ended["flood"].stdout) == 64 << 10 and ended["flood"].stdout_cut
    assert ended["shared"].reason == "memory"
    assert ended["fill"].reason == "disk" or "No space left" in ended["fill"].stderr
    assert ended["many"].reason == "disk" or int(ended["many"].stdout) < 5000
    assert ended_all(holders) and len(os.listdir("/proc/self/fd")) <= descriptors


@pytest.mark.parametrize("place", PLACES)
def test_a_program_that_goes_on_is_ended_at_its_time_with_all_that_it_started(place):
    began = time.monotonic()
    text = "import os, time\nif not os.fork(): os.setsid()\nprint('a', flush=True)\ntime.sleep(1000)"

    async def run():
        async with opened(place) as sandbox:
            return await sandbox.exec(program(text), timeout_s=1)

    done = asyncio.run(run())
    assert done.reason == "time" and done.stdout and time.monotonic() - began < 60


def test_a_call_that_is_cancelled_ends_its_program():
    async def run():
        async with opened("here-namespaces") as sandbox:
            task = asyncio.create_task(sandbox.exec(marked("import time; open('x', 'w'); time.sleep(1000)")))
            while "x" not in await sandbox.list():
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with asyncio.timeout(20):
                while any(MARK in line for line in processes().values()):
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_holder_that_is_killed_is_a_typed_failure_and_leaves_nothing():
    from whet.env.sandbox.base import SandboxFailed

    async def run(place):
        before = os.getcwd()
        async with opened(place) as sandbox:
            await sandbox.exec(program(f"{DEEP}\nos.chmod('../../d', 0)"))
            os.kill(sandbox._holder.pid, 9)
            with pytest.raises(SandboxFailed, match="sandbox's process"):
                await sandbox.exec(["true"])
            folder = sandbox._holder.outside
        assert folder is None or not os.path.exists(folder)
        assert os.getcwd() == before, "the run goes on where it was"

    for place in ("here-namespaces", "here-landlock"):
        asyncio.run(run(place))


@pytest.mark.parametrize("place", ["here-namespaces", "here-landlock"])
def test_an_archive_bomb_is_bounded_by_the_folder(place):
    text = (
        "import zipfile\nwith zipfile.ZipFile('b.zip', 'w', 8) as z:\n  for n in range(4): z.writestr(f'z{n}', bytes(4 << 20))\n"
        "zipfile.ZipFile('b.zip').extractall('.')"
    )
    done = play(place, program(text), ["sh", "-c", "echo on"], config=SMALL)
    assert done[0].status or done[0].reason == "disk"
    assert done[1].stdout == "on\n"


@pytest.mark.long
def test_sixty_four_at_once():
    async def one(number):
        async with opened("here-namespaces") as sandbox:
            holders.append(sandbox._holder.pid)
            return (await sandbox.exec(["sh", "-c", f"echo {number}"])).stdout

    async def run():
        return await asyncio.gather(*(one(number) for number in range(64)))

    holders = []
    assert asyncio.run(run()) == [f"{number}\n" for number in range(64)]
    assert len(holders) == 64 and ended_all(holders)
