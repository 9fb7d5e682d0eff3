"""The process that renders chat templates: started for the first rendering, ended with this process,
and restarted if it dies."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import threading
from collections.abc import Sequence

from whet.calls.lines import AnswerTooLong, LinePipes, start_line_worker
from whet.data.template_worker import READY, TEXT_LIMIT_CHARS
from whet.runfolder.child_environment import child_environment
from whet.types import JSON

CPU_LIMIT_S = 10.0
"""Processor time for one rendering, in seconds: a thousand times that of a long conversation."""
START_LIMIT_S = 180.0
REPLY_LIMIT_S = 600.0
"""Wall time for one rendering, in seconds, for a machine busy with other things; the effective limit is
the processor time (`CPU_LIMIT_S`)."""
_REPLY_LIMIT_BYTES = 12 * TEXT_LIMIT_CHARS + 1000


class TemplateFailed(ValueError):
    """A template cannot be rendered, for a reason of its own."""


class TemplateProcess:
    """Renders templates under limits. Calls from several threads take turns.

    Args:
        cpu_limit_s: for one rendering.
    """

    def __init__(self, cpu_limit_s: float = CPU_LIMIT_S) -> None:
        self._cpu_limit_s = cpu_limit_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._pipes: LinePipes | None = None
        self._places: dict[str, int] = {}
        """The templates that the child has."""
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    def render(self, template: str, messages: Sequence[JSON], tools: Sequence[JSON] | None, *, generate: bool, options: JSON) -> str:
        """The text that transformers renders from a template.

        Args:
            template: Jinja's text.
            messages: at least one.
            tools: JSON schemas; None: there are none.
            generate: end with the opening of an assistant's turn.
            options: further variables of the template.

        Raises:
            TemplateFailed: if it raises, or takes more time or memory than a template may.
        """
        request = {"messages": list(messages), "tools": tools and list(tools), "generate": generate, "options": options}
        body = json.dumps(request).encode()
        with self._lock:
            pipes = self._pipes or self._start()
            lines = b""
            if template not in self._places:
                self._places[template] = len(self._places)
                lines = json.dumps({"template": template}).encode() + b"\n"
            lines += b'{"place": %d, "request": %b}\n' % (self._places[template], body)
            try:
                reply = json.loads(pipes.exchange(lines, REPLY_LIMIT_S))
            except (TimeoutError, EOFError, AnswerTooLong, ValueError) as error:
                self._end()
                limit = f"{self._cpu_limit_s:g} s of the processor's time"
                raise TemplateFailed(f"it took over {limit}, or its process died ({error})") from error
        if "error" in reply:
            raise TemplateFailed(reply["error"])
        return reply["text"]

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._end()

    def _start(self) -> LinePipes:
        self._child, self._pipes = start_line_worker(
            "whet.data.template_worker",
            self._cpu_limit_s,
            "renders chat templates",
            ready=READY,
            environment=child_environment(),
            limit_bytes=_REPLY_LIMIT_BYTES,
            timeout_s=START_LIMIT_S,
        )
        return self._pipes

    def _end(self) -> None:
        child, pipes = self._take()
        if child is not None and pipes is not None:
            child.kill()
            child.wait()
            pipes.close()

    def _forget(self) -> None:
        """Forget the child after a fork: a forked process starts its own, and does not hold the pipes
        of its parent's child open."""
        self._lock = threading.Lock()
        child, pipes = self._take()
        if child is not None and pipes is not None:
            child.returncode = 0
            pipes.close()

    def _take(self) -> tuple[subprocess.Popen[bytes] | None, LinePipes | None]:
        child, pipes = self._child, self._pipes
        self._child, self._pipes, self._places = None, None, {}
        return child, pipes


TEMPLATES = TemplateProcess()
"""This process's."""
