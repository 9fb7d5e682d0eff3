"""Errors for clients, in OpenAI's form or Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping

from whet.types import JSON

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""Each status that is sent, and its type in the error."""
ANTHROPIC_KINDS = KINDS | {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
"""The same, by Anthropic's names."""
ANTHROPIC_ENDS = ("/v1/messages", "/v1/messages/count_tokens")
"""Ends of the paths whose errors are in Anthropic's form."""

MAX_MESSAGE = 2000
"""Characters of an error: what it quotes was written by its client."""


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status, one of `KINDS`.
        message: the fault and the remedy.
        param: the field of the request that is to blame.
        code: a word that programs can read.
        retry_after_s: seconds after which a client may try again.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}...")
        self.status, self.param, self.code = status, param, code
        self.headers: Mapping[str, str] = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}

    def to_dict(self) -> dict[str, JSON]:
        """The body of the answer."""
        return {"error": {"message": str(self), "type": KINDS[self.status], "param": self.param, "code": self.code}}

    def to_anthropic(self) -> dict[str, JSON]:
        """The body of the answer, or the last event of a stream, for Anthropic's clients."""
        return {"type": "error", "error": {"type": ANTHROPIC_KINDS[self.status], "message": str(self)}}

    def body_for(self, path: str) -> dict[str, JSON]:
        """The body of the answer on a route."""
        return self.to_anthropic() if path.endswith(ANTHROPIC_ENDS) else self.to_dict()
