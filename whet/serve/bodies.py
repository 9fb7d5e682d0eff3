"""Request bodies: read within a limit, parsed as strict JSON, and checked field by field."""

from __future__ import annotations

import asyncio
import difflib
from concurrent.futures import Executor
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from whet.data.strict_json import parse_json
from whet.serve.bounds import check_shape, check_size
from whet.serve.errors import ApiError
from whet.types import JSON

BODY_TIMEOUT_S = 60
"""For a client to send its whole request."""
MAX_BODIES = 32
"""As large as one may be, that are in memory at a time."""
SMALL_BYTES = 16 * 1024
"""A body of no more is read on the event loop."""


class Body(BaseModel):
    """A request's body. A field that it does not have is an error unless it is null: what is not understood is not silently left out."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


B = TypeVar("B", bound=Body)


class BodyMemory:
    """For bodies that arrive or are read: all of them together are bounded, since many could be as large as one may be.

    Args:
        max_bytes: size limit of one body.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Take room for bytes.

        Raises:
            ApiError: 503 if there is no room; the caller still gives back what it took.
        """
        self.num_bytes += num_bytes
        if self.num_bytes > self.max_bytes * MAX_BODIES:
            message = "the bodies of requests that are being read take too much memory; try again later"
            raise ApiError(503, message, code="server_full", retry_after_s=1)

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


async def read_json(request: Request, room: BodyMemory, texts: Executor) -> JSON:
    """The JSON value that a request carries; an empty body is an empty object.

    Args:
        request: a request whose body has not been read.
        room: memory for the body.
        texts: parses it, off the event loop.

    Raises:
        ApiError: 413 over the limit, 415 for another content type, 400 if it is no JSON, too large a
            structure or does not arrive in time.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the content type is {kind!r}; send application/json")
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            await _read(request, raw, room)
        if len(raw) <= SMALL_BYTES:
            return _parsed(bytes(raw))
        return await asyncio.get_running_loop().run_in_executor(texts, _parsed, bytes(raw))
    except TimeoutError:
        raise ApiError(400, f"the body did not arrive within {BODY_TIMEOUT_S} s") from None
    finally:
        room.give_back(len(raw))


def _parsed(raw: bytes) -> JSON:
    if not raw.strip():
        return {}
    check_size(raw)
    try:
        value = parse_json(raw.decode())
    except ValueError as error:  # of JSON or UTF-8
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    check_shape(value)
    return value


async def _read(request: Request, raw: bytearray, room: BodyMemory) -> None:
    """The body, read no further than the limit."""
    max_bytes = room.max_bytes
    too_large = ApiError(413, f"the body is over the limit of {max_bytes} bytes (max_body_bytes)", code="body_too_large")
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or len(declared) > 18 or int(declared) > max_bytes:
        raise too_large
    async for piece in request.stream():
        raw += piece
        room.take(len(piece))
        if len(raw) > max_bytes:
            raise too_large


def parse_body(model: type[B], value: JSON) -> B:
    """The value as a typed body.

    Raises:
        ApiError: 400, naming the field that is wrong.
    """
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {type(value).__name__}, expected an object")
    try:
        return model.model_validate({key: item for key, item in value.items() if item is not None or key in model.model_fields})
    except ValidationError as error:
        found = error.errors(include_url=False)
        first = next((each for each in found if not each["type"].endswith("_type")), found[0])  # of a field's forms, the one that was meant
    path = ".".join(str(part) for i, part in enumerate(first["loc"]) if i == 0 or not _is_kind(part))[:200]
    if first["type"] != "extra_forbidden":
        raise ApiError(400, f"{path}: {first['msg']}", param=path)
    near = difflib.get_close_matches(path, list(model.model_fields), 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ApiError(400, f"{path} is not supported by this server{hint}", param=path, code="unsupported_parameter")


def parse_part(where: str, model: type[B], value: JSON) -> B:
    """A part of a body as a typed one.

    Raises:
        ApiError: 400, naming the place.
    """
    try:
        return parse_body(model, value)
    except ApiError as error:
        raise ApiError(400, f"{where}: {error}", param=f"{where}.{error.param or ''}".rstrip("."), code=error.code) from None


def _is_kind(part: str | int) -> bool:
    """True if a part of an error's place is pydantic's name for one of several forms of a field, which
    clients do not know."""
    return isinstance(part, str) and (part in ("str", "int", "float") or "[" in part or part.startswith("constrained-"))
