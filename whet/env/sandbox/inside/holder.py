"""The process that holds one sandbox: `holder.main()` with a socket's number and settings in JSON as arguments.

It makes the sandbox's room, says on the socket that it is ready or why not, and then makes a child for each connection that it is sent. The
child reads one request from its connection, does it, and answers there. When the socket closes, everything ends.

Messages are JSON after its length; it says how many bytes follow.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from whet.env.sandbox.inside import kernel, paths
from whet.env.sandbox.inside.rooms import Surroundings
from whet.env.sandbox.inside.tree import ProcessTree, reap
from whet.env.sandbox.inside.watch import ProgramWatch, StartFailed

HEAD = struct.Struct("!I")
"""Length of the JSON that a message begins with."""
MAX_SENT = 4
"""Descriptors in one message: a connection, and a program's input, output and error output."""


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    settings = json.loads(sys.argv[2])
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the starter decides when it ends
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, most), most))
    try:
        room = Surroundings(settings)
    except Exception as error:  # whatever the kernel does not allow; it is sent to the starter
        control.send(json.dumps({"fault": str(error)}).encode())
        return
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    given = [] if room.listener is None else [room.listener.fileno()]
    socket.send_fds(control, [json.dumps({"folder": room.folder, "uid": room.uid, "outside": not room.in_namespaces}).encode()], given)
    try:
        _serve(control, room)
    finally:
        ProcessTree(room.proc).end_below(os.getpid())
        room.close()


def _serve(control: socket.socket, room: Surroundings) -> None:
    """Until the starter closes its socket."""
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    wake, woken = os.pipe()
    for end in (wake, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    tree = ProcessTree(room.proc)
    children: set[int] = set()
    while True:
        ready, _, _ = select.select([control, wake], [], [])
        if wake in ready:
            with suppress(BlockingIOError):
                os.read(wake, 4096)
            children -= reap().keys()
            for stray in set(tree.children(os.getpid())) - children:  # its own parent here broke
                with suppress(ProcessLookupError):
                    os.kill(stray, signal.SIGKILL)
        if control in ready:
            message, descriptors, _, _ = socket.recv_fds(control, 1, MAX_SENT)
            if not message:
                return
            if not (pid := os.fork()):
                _answer(control, room, descriptors)
            children.add(pid)
            for descriptor in descriptors:
                os.close(descriptor)


def _answer(control: socket.socket, room: Surroundings, descriptors: list[int]) -> NoReturn:
    """Do what one connection asks for, in a process of its own."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    control.close()
    caller = socket.socket(fileno=descriptors[0])
    try:
        size = HEAD.unpack(_bytes(caller, HEAD.size))[0]
        request = json.loads(_bytes(caller, size))
        given = _bytes(caller, request["size"])
        head, *parts = _done(room, request, given, caller, descriptors[1:])
        _send(caller, {**head, "sizes": [len(part) for part in parts]}, *parts)
    except Exception as error:  # a fault of the sandbox itself, or a caller that is gone
        with suppress(OSError):
            _send(caller, {"fault": f"{type(error).__name__}: {error}", "sizes": []})
    finally:
        os._exit(0)


def _done(room: Surroundings, request: Mapping[str, Any], given: bytes, caller: socket.socket, descriptors: list[int]) -> tuple[Any, ...]:
    """The answer to a request: a head, and byte strings."""
    what = request["do"]
    if what == "run":
        counted = room.uid is not None or room.in_namespaces
        own = 0 if counted else ProcessTree(room.proc).num_tasks(os.geteuid())  # the kernel counts by user
        limits = {**request, "nproc": own + request["max_processes"] + 1}
        try:
            return ProgramWatch(room, limits, caller).run(None if descriptors else given, descriptors)
        except StartFailed as error:
            return ({"fault": str(error)},)
    if room.uid is not None:
        os.setgroups([])
        os.setresgid(room.uid, room.uid, room.uid)
        os.setresuid(room.uid, room.uid, room.uid)
    try:
        if what == "read":
            content, size = paths.read(room.folder, request["path"], request["max_bytes"])
            return {"size": size}, content
        if what == "list":
            return ({"names": paths.listing(room.folder, request["path"], request["max_names"])},)
        assert what == "write", what
        if room.over():
            raise paths.PathFault("the folder is full: remove something first")
        limit = request["file_mb"] << 20
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        paths.write(room.folder, request["path"], given)
        return ({},)
    except paths.PathFault as error:
        return ({"refused": str(error)},)


def _bytes(caller: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = caller.recv(min(1 << 16, size - len(found)))
        if not part:
            raise EOFError("the request ended early")
        found += part
    return bytes(found)


def _send(caller: socket.socket, head: Mapping[str, Any], *parts: bytes) -> None:
    text = json.dumps(head).encode()
    caller.sendall(HEAD.pack(len(text)) + text + b"".join(parts))
