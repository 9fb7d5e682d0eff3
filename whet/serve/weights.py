"""SGLang's routes for weights that a trainer broadcasts, and its checksums of weights in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable
from typing import Literal

from starlette.responses import JSONResponse, Response

from whet.serve.bodies import Body, parse_body
from whet.serve.bounds import Name
from whet.serve.broadcast import GROUP, BucketBody, GroupBody, Selector
from whet.serve.control import WeightsRefused
from whet.serve.service import Service
from whet.types import JSON


class LeaveBody(Body):
    """A process group to leave."""

    group_name: Name = GROUP


class BeginBody(Body):
    """Models of an update; here is one."""

    selector: Selector = "all"


class EndBody(Body):
    """Nothing."""


class VersionBody(Body):
    """A label of the present weights."""

    new_version: Name
    abort_all_requests: bool = True


class CheckBody(Body):
    """A question about the weights in memory."""

    action: Literal["checksum"]
    allow_quant_error: bool = False
    skip_tensor_list: list[Name] | None = None
    selector: Selector = "target"


async def init_weights_update_group(service: Service, value: JSON) -> Response:
    body = parse_body(GroupBody, value)
    if service.config.engine.embedded.copies > 1:
        return _failed("an engine of several copies (engine.embedded.copies) takes no broadcast")
    return await _answered(service.broadcasts.join(body), "Succeeded to initialize custom process group.")


async def destroy_weights_update_group(service: Service, value: JSON) -> Response:
    return await _answered(service.broadcasts.leave(parse_body(LeaveBody, value).group_name), "Succeeded to destroy custom process group.")


async def begin_weight_update(service: Service, value: JSON) -> Response:
    parse_body(BeginBody, value)
    return await _answered(service.broadcasts.begin(), "Success")


async def update_weights_from_distributed(service: Service, value: JSON) -> Response:
    """Receive a bucket of the open update."""
    body = parse_body(BucketBody, value)
    if body.abort_all_requests:
        await service.calls.abort_all("the weights are updated")
    return await _answered(service.broadcasts.receive(body), "Succeeded to update parameter online.")


async def end_weight_update(service: Service, value: JSON) -> Response:
    """Serve the weights of the open update from the next token on."""
    parse_body(EndBody, value)

    async def taken_over() -> None:
        update = await service.broadcasts.end()
        await service.control.take_over(lambda: service.broadcasts.own(update), update.label, "what was broadcast")

    return await _answered(taken_over(), "Success")


async def update_weight_version(service: Service, value: JSON) -> Response:
    body = parse_body(VersionBody, value)
    if body.abort_all_requests:
        await service.calls.abort_all("the version was changed")
    service.control.rename(body.new_version)
    return JSONResponse({"success": True, "message": f"Weight version updated to {body.new_version}", "new_version": body.new_version})


async def weights_checker(service: Service, value: JSON) -> Response:
    """Tell a checksum of each tensor in the engine's memory."""
    body = parse_body(CheckBody, value)
    if service.digests is None:
        return _failed("an engine in processes of its own tells no checksums here")
    skipped = body.skip_tensor_list or []
    found = {name: digest for name, digest in (await service.digests()).items() if not any(part in name for part in skipped)}
    overall = hashlib.sha256("".join(f"{name}{found[name]}" for name in sorted(found)).encode()).hexdigest()
    info = {"role": "target", "rank": 0, "size": 1}
    for size in ("tp", "dp", "pp"):
        info |= {f"{size}_rank": 0, f"{size}_size": 1}
    rank = {"checksums": found, "per_gpu_checksum": overall, "parallelism_info": [info]}
    return JSONResponse({"success": True, "message": "Success.", "ranks": [rank]})


async def _answered(work: Awaitable[None], message: str) -> Response:
    try:
        await work
    except WeightsRefused as error:
        return _failed(str(error))
    return JSONResponse({"success": True, "message": message})


def _failed(message: str) -> Response:
    return JSONResponse({"success": False, "message": message}, 400)
