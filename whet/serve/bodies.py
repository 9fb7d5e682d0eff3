"""Request bodies: read within a limit, parsed as strict JSON, and checked field by field."""

from __future__ import annotations

import asyncio
import difflib
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from whet.data.strict_json import parse_json
from whet.serve.errors import ApiError
from whet.types import JSON

BODY_TIMEOUT_S = 60
"""For a client to send its whole request."""


class Body(BaseModel):
    """A request's body. A field that it does not have is an error unless it is null: what is not understood is not silently left out."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


B = TypeVar("B", bound=Body)


async def read_json(request: Request, max_bytes: int) -> JSON:
    """The JSON value that a request carries; an empty body is an empty object.

    Raises:
        ApiError: 413 over the limit, 415 for another content type, 400 if it is no JSON or does not arrive in time.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the content type is {kind!r}; send application/json")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            raw = await _read(request, max_bytes)
    except TimeoutError:
        raise ApiError(400, f"the body did not arrive within {BODY_TIMEOUT_S} s") from None
    if not raw.strip():
        return {}
    try:
        return parse_json(raw.decode())
    except ValueError as error:  # of JSON or UTF-8
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    """The body, read no further than the limit."""
    too_large = ApiError(413, f"the body is over the limit of {max_bytes} bytes (max_body_bytes)", code="body_too_large")
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or len(declared) > 18 or int(declared) > max_bytes:
        raise too_large
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > max_bytes:
            raise too_large
    return bytes(raw)


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
        first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] != "extra_forbidden":
        raise ApiError(400, f"{path}: {first['msg']}", param=path)
    near = difflib.get_close_matches(path, list(model.model_fields), 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ApiError(400, f"{path} is not supported by this server{hint}", param=path, code="unsupported_parameter")
