"""Renders chat templates in a process of its own, which `whet.data.template_process` starts and bounds.

A template comes with a model's folder. It is a program: one expression can ask for any time and memory, so only limits of a process hold.
Requests and replies are lines of JSON.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
from typing import Any

MEMORY_LIMIT_BYTES = 1 << 30
"""Memory in addition to that of the process at its start."""
TEXT_LIMIT_CHARS = 1 << 26
READY = b"ready\n"


def main(cpu_limit_s: float) -> None:
    """Answer requests until there are no more.

    Args:
        cpu_limit_s: processor time for one rendering, in seconds.
    """
    os.environ.update(USE_TORCH="0", USE_TF="0")  # transformers' renderer needs neither
    from transformers.utils.chat_template_utils import render_jinja_template

    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints is no reply
    _limit()
    templates: list[str] = []
    replies.write(READY)
    replies.flush()
    for line in requests:
        request = json.loads(line)
        if "template" in request:
            templates.append(request["template"])
            continue
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)  # its signal ends the process, whatever it is in
        reply = _answer(render_jinja_template, templates[request["place"]], request["request"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(reply + b"\n")
        replies.flush()


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere the system bounds no address space
        with open("/proc/self/statm") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(render: Any, template: str, request: dict[str, Any]) -> bytes:
    random.seed(0)
    try:
        given = {"tools": request["tools"], "add_generation_prompt": request["generate"], **request["options"]}
        (text,), _ = render([request["messages"]], chat_template=template, **given)
        if len(text) > TEXT_LIMIT_CHARS:
            return json.dumps({"error": f"it writes over {TEXT_LIMIT_CHARS} characters"}).encode()
        return json.dumps({"text": text}).encode()
    except MemoryError:
        return json.dumps({"error": f"it needs over {MEMORY_LIMIT_BYTES >> 20} MiB of memory"}).encode()
    except RecursionError:
        return json.dumps({"error": "it calls itself too deeply"}).encode()
    except Exception as error:  # a template may raise anything
        kind = "" if type(error).__name__ in ("ValueError", "TypeError", "TemplateError") else f"{type(error).__name__}: "
        return json.dumps({"error": f"{kind}{error}"[:10_000]}).encode()
