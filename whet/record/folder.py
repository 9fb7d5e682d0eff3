"""`whet record`: a server that writes down every call of the programs that use it, a file for each session."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from whet.engine.base import closing_reply
from whet.files import AppendedLines
from whet.record.session import CurrentSession, Session
from whet.record.tree import RecordedCall
from whet.runfolder.lock import Claim, claim
from whet.serve.service import Service
from whet.types import JSON, Chunk, Request

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Names of sessions: they are names of files, too."""
DEFAULT = "default"
"""Session of requests that name none."""
MAX_SESSIONS = 10_000


def claim_sessions(folder: Path) -> Claim:
    """Take a folder for the sessions that this process records.

    Raises:
        FolderInUse: another process records into it.
        ValueError: it has files of sessions already, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be made: {error.strerror}; choose another folder with --out") from error
    claimed = claim(folder, f"whet record --out {folder}")
    if any(folder.glob("*.jsonl")):
        claimed.release()
        raise ValueError(f"{folder} has recorded sessions already: choose another folder with --out")
    return claimed


class SessionFolder:
    """Sessions that are opened by their first request, each with a file of its calls.

    Args:
        service: answers requests; its engine samples as each client asks.
        claimed: the folder, which gets `NAME.jsonl` for each session, readable by its owner alone.
    """

    def __init__(self, service: Service, claimed: Claim) -> None:
        self.service = replace(service, prompts=CurrentSession(), generate=CurrentSession().generate, any_model=True)
        self._folder = claimed.folder
        self._sessions: dict[str, Session] = {}
        self._files: list[AppendedLines] = []

    def find(self, key: str) -> Session | None:
        """The session of a key, opened if it is new; None: its name cannot be one, or there are too many."""
        name = key or DEFAULT
        if name not in self._sessions:
            if NAME.fullmatch(name) is None or len(self._sessions) >= MAX_SESSIONS:
                return None
            self._sessions[name] = self._opened(name)
        return self._sessions[name]

    async def close(self) -> None:
        """End every session, and close its file."""
        for session in self._sessions.values():
            await session.close()
        for file in self._files:
            file.close()

    def _opened(self, name: str) -> Session:
        path = self._folder / f"{name}.jsonl"
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
        file = AppendedLines(path)
        self._files.append(file)
        engine = self.service.engine

        async def stream(request: Request, number: int) -> AsyncIterator[Chunk]:
            async with closing_reply(engine.generate(replace(request, conversation=f"record/{name}"))) as chunks:
                async for chunk in chunks:
                    yield chunk

        def on_call(call: RecordedCall, request: Request) -> None:
            file.append(json.dumps({"session": name, **line_of(call, request)}, ensure_ascii=False))

        session = Session(self.service.renderer, stream, on_call=on_call)
        session.service = self.service
        return session


def line_of(call: RecordedCall, request: Request) -> dict[str, JSON]:
    """A call as JSON: its place in the session's tree, its tokens, and what was sampled how."""
    spec, reply, sampling = call.spec, call.reply, request.sampling
    sampled: dict[str, Any] = {
        "tokens": list(reply.tokens.column()),
        "logprobs": [float(logprob) for logprob in reply.logprobs.column()],
        "versions": [list(run) for run in reply.versions],
        "finish": str(reply.finish),
        "message": None if call.message is None else call.message.to_dict(),
    }
    return {
        "call": call.number,
        "parent": None if spec.parent is None else spec.parent.number,
        "rule": str(spec.rule),
        "trains": spec.trained,
        "continues": call.continues,
        "model": spec.model,
        "messages": [message.to_dict() for message in spec.messages] if spec.text is None else spec.text,
        "prompt": list(spec.prompt),
        **sampled,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
    }
