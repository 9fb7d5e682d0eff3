"""The routes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from whet.serve import admin, weights
from whet.serve.anthropic_messages import count_tokens, prepare_messages
from whet.serve.endpoint import CommandEndpoint, Generation, Handle, Prepare, error_response
from whet.serve.errors import KINDS, ApiError
from whet.serve.native import prepare_generate
from whet.serve.openai_chat import prepare_chat
from whet.serve.openai_completions import prepare_completion
from whet.serve.openai_responses import prepare_response
from whet.serve.service import Service
from whet.serve.tokens import abort_requests, prepare_tokens

GENERATE: Mapping[str, Prepare] = {
    "/v1/chat/completions": prepare_chat,
    "/v1/completions": prepare_completion,
    "/v1/responses": prepare_response,
    "/v1/messages": prepare_messages,
    "/generate": prepare_generate,
    "/inference/v1/generate": prepare_tokens,
}
COUNT: Mapping[str, Handle] = {"/v1/messages/count_tokens": count_tokens}
READ: Mapping[str, Handle] = {
    "/health": admin.health,
    "/health_generate": admin.health_generate,
    "/v1/models": admin.models,
    "/model_info": admin.model_info,
    "/get_model_info": admin.model_info,
    "/server_info": admin.server_info,
    "/get_server_info": admin.server_info,
    "/weight_version": admin.weight_version,
    "/get_weight_version": admin.weight_version,
}
CHANGE: Mapping[str, Handle] = {
    "/abort_request": admin.abort_request,
    "/pause_generation": admin.pause_generation,
    "/continue_generation": admin.continue_generation,
    "/flush_cache": admin.flush_cache,
    "/update_weights_from_disk": admin.update_weights_from_disk,
    "/init_weights_update_group": weights.init_weights_update_group,
    "/destroy_weights_update_group": weights.destroy_weights_update_group,
    "/begin_weight_update": weights.begin_weight_update,
    "/update_weights_from_distributed": weights.update_weights_from_distributed,
    "/end_weight_update": weights.end_weight_update,
    "/update_weight_version": weights.update_weight_version,
    "/weights_checker": weights.weights_checker,
    "/inference/v1/abort_requests": abort_requests,
}
ALSO_GET = ("/flush_cache",)
"""SGLang's clients call it either way."""


class ExactRoute(Route):
    """A route that is reached by its path alone. Starlette's pattern also takes a line break behind it, a path that `Guard` asks no admin
    key for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z")


def make_app(service: Service) -> Starlette:
    """Everything that is served, without who may ask for it."""

    async def one_model(request: Request) -> Response:
        try:
            service.check_model(request.path_params["name"])
        except ApiError as error:
            return error_response(error, request.scope["path"])
        return JSONResponse(admin.model_card(service))

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = error.status_code if error.status_code in KINDS else 400
        path = request.scope["path"]
        return error_response(ApiError(status, f"{request.method} {path[:200]}: {error.detail}"), path)

    async def fault(request: Request, error: Exception) -> Response:
        """Answer 500. The traceback is in the server's log."""
        return error_response(ApiError(500, f"the server failed: {type(error).__name__}; its log says where"), request.scope["path"])

    routes = [ExactRoute(path, Generation(service, prepare), methods=["POST"]) for path, prepare in GENERATE.items()]
    routes += [ExactRoute(path, CommandEndpoint(service, handle, reads=False), methods=["GET"]) for path, handle in READ.items()]
    routes += [ExactRoute(path, CommandEndpoint(service, handle, stays=False), methods=["POST"]) for path, handle in COUNT.items()]
    for path, handle in CHANGE.items():
        routes.append(ExactRoute(path, CommandEndpoint(service, handle), methods=["POST", "GET"] if path in ALSO_GET else ["POST"]))
    routes.append(ExactRoute("/v1/models/{name:path}", one_model, methods=["GET"]))
    app = Starlette(routes=routes, exception_handlers={HTTPException: no_route, Exception: fault})
    app.router.redirect_slashes = False  # it would read the Host header, which anybody writes
    return app
