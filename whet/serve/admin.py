"""SGLang's routes of control and information, and OpenAI's list of models."""

from __future__ import annotations

import asyncio
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse, PlainTextResponse, Response

from whet.engine.base import EngineFailed
from whet.serve.bodies import Body, parse_body
from whet.serve.bounds import Count, FilePath, Name
from whet.serve.control import PauseMode, WeightsRefused
from whet.serve.errors import ApiError
from whet.serve.service import Service
from whet.types import JSON, Finish, Request, SamplingParams
from whet.types.columns import Ints

HEALTH_TIMEOUT_S = 20.0
"""For a token of a health check, like SGLang's."""


class AbortBody(Body):
    """Which request to end."""

    rid: Name = ""
    abort_all: bool = False


class PauseBody(Body):
    """Body of a pause: the treatment of running requests."""

    mode: PauseMode = "abort"


class ContinueBody(Body):
    """Nothing that matters here."""

    torch_empty_cache: bool = True


class WeightsBody(Body):
    """Which weights to serve. Caches of older weights are always dropped."""

    model_path: FilePath
    weight_version: Name | None = None
    abort_all_requests: bool = False
    keep_pause: bool = False
    flush_cache: bool = True
    is_async: bool = False
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False
    load_format: Name | None = None
    token_step: Count = 0


async def health(service: Service, value: JSON) -> Response:
    """Answer 200 while the server answers at all."""
    return Response()


async def health_generate(service: Service, value: JSON) -> Response:
    """Have the engine sample a token. A paused engine counts as healthy. Callers in the meantime wait
    for the same token."""
    if service.control.paused:
        return PlainTextResponse("paused")
    if service.health is None or service.health.done():
        service.health = asyncio.create_task(_sample_one(service))
    await asyncio.shield(service.health)
    return Response()


async def _sample_one(service: Service) -> None:
    name = f"health-{id(asyncio.current_task())}"
    request = Request(name, Ints(service.renderer.stop_token_ids[:1]), SamplingParams(max_tokens=1, temperature=0.0))
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            async for chunk in service.engine.generate(request):
                if chunk.finish is Finish.LENGTH:
                    return
    except TimeoutError:
        raise ApiError(503, f"the engine sampled no token within {HEALTH_TIMEOUT_S:g} s") from None
    except EngineFailed as error:
        raise ApiError(503, f"the engine failed: {error}") from None
    raise ApiError(503, "the engine ended a request without a token")


async def abort_request(service: Service, value: JSON) -> Response:
    """End one request, or all. Their callers get the tokens sampled so far."""
    body = parse_body(AbortBody, value)
    if body.abort_all:
        await service.calls.abort_all("aborted by /abort_request")
    else:
        await service.calls.abort(body.rid, "aborted by /abort_request")
    return Response()


async def pause_generation(service: Service, value: JSON) -> Response:
    await service.control.pause(parse_body(PauseBody, value).mode)
    return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(service: Service, value: JSON) -> Response:
    parse_body(ContinueBody, value)
    await service.control.resume()
    return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})


async def flush_cache(service: Service, value: JSON) -> Response:
    """Forget everything cached; unlike SGLang's it is done while requests run, too."""
    await service.control.flush()
    return PlainTextResponse("Cache flushed.\n")


async def update_weights_from_disk(service: Service, value: JSON) -> Response:
    """Serve other weights of the same model."""
    body = parse_body(WeightsBody, value)
    if body.load_format not in (None, "auto", "safetensors"):
        raise ApiError(400, f"load_format {body.load_format!r} is not supported; leave it out", param="load_format")
    open_calls = service.calls.num_open
    try:
        label = await service.control.update(
            Path(body.model_path), body.weight_version, abort_running=body.abort_all_requests, keep_paused=body.keep_pause
        )
    except WeightsRefused as error:
        return JSONResponse({"success": False, "message": str(error), "num_paused_requests": open_calls}, 400)
    message = f"Succeeded to update model weights. Weight version updated to {label}."
    return JSONResponse({"success": True, "message": message, "num_paused_requests": open_calls})


async def model_info(service: Service, value: JSON) -> Response:
    return JSONResponse(
        {
            "model_path": service.config.model.path,
            "tokenizer_path": service.config.model.path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": service.control.label(service.engine.version),
        }
    )


async def weight_version(service: Service, value: JSON) -> Response:
    return JSONResponse({"weight_version": service.control.label(service.engine.version)})


async def server_info(service: Service, value: JSON) -> Response:
    config, engine = service.config, service.engine
    state: dict[str, Any] = {
        "num_running_reqs": service.gate.num_running,
        "num_waiting_reqs": service.gate.num_waiting,
        "is_paused": service.control.paused,
    }
    embedded = config.engine.embedded
    sizes = {"tp_size": embedded.tensor_parallel, "dp_size": embedded.copies, "pp_size": 1, "ep_size": 1, "nnodes": 1}
    return JSONResponse(
        {
            "model_path": config.model.path,
            "tokenizer_path": config.model.path,
            "served_model_name": service.name,
            "host": config.host,
            "port": config.port,
            "dtype": config.model.dtype,
            "weight_version": service.control.label(engine.version),
            "context_length": engine.capabilities.max_tokens,
            "max_running_requests": config.limits.max_running,
            "tool_call_parser": service.renderer.format.name,
            **sizes,
            "internal_states": [state],
            "version": f"whet {package_version('whet')}",
        }
    )


def model_card(service: Service) -> dict[str, JSON]:
    """The model, as OpenAI describes one."""
    return {
        "id": service.name,
        "object": "model",
        "created": service.began,
        "owned_by": "whet",
        "root": service.config.model.path,
        "max_model_len": service.engine.capabilities.max_tokens,
    }


async def models(service: Service, value: JSON) -> Response:
    return JSONResponse({"object": "list", "data": [model_card(service)]})
