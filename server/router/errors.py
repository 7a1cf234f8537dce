"""What can go wrong in the router, and the one shape in which a client hears of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from bidikv_server.router.core.engines import Role


class RouterFault(Exception):  # noqa: N818
    """A turn that the router has to refuse or give up.

    Attributes:
        status: HTTP status, if nothing was sent yet.
        code: Machine-readable cause.
        kind: OpenAI's error type.
        param: The body field at fault, if one is.
        retry_after_s: When another try may go better; None says nothing about it.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "server_error"
    retry_after_s: ClassVar[int | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class BadRequest(RouterFault):
    """The client has to change its request."""

    status, code, kind = 400, "invalid_request", "invalid_request_error"


class Unauthorized(RouterFault):
    """The request carries no key that is known here. What it carries is not repeated."""

    status, code, kind = 401, "invalid_api_key", "invalid_request_error"

    def __init__(self, *, missing: bool) -> None:
        said = "No API key was given" if missing else "The API key is not known here"
        super().__init__(f"{said}: send a valid one as 'Authorization: Bearer KEY'.")


class NotFound(RouterFault):
    """No such endpoint."""

    status, code, kind = 404, "not_found", "invalid_request_error"


class UnknownResponse(RouterFault):
    """No response of this name is kept for the caller; in vLLM's words, code and all."""

    status, code, kind = 404, "not_found", "invalid_request_error"

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Response with id '{response_id}' not found.", param="response_id")

    def body(self) -> dict[str, Any]:
        """As an engine answers that does not keep it."""
        told = super().body()
        return {"error": {**told["error"], "code": self.status}}


class ResponseUnreachable(RouterFault):
    """The engine that keeps the response is down; it may come back, and then says itself whether it still has it."""

    status, code, retry_after_s = 503, "response_unreachable", 1

    def __init__(self) -> None:
        super().__init__(
            "The engine that keeps this response is not reachable; try again, or send the whole history."
        )


class MethodNotAllowed(RouterFault):
    """The endpoint exists, the method does not."""

    status, code, kind = 405, "method_not_allowed", "invalid_request_error"


class BodyTooLarge(RouterFault):
    """The request body is above the limit."""

    status, code, kind = 413, "request_too_large", "invalid_request_error"


class RequestTooSlow(RouterFault):
    """The request has not arrived whole in its time."""

    status, code, kind = 408, "request_too_slow", "invalid_request_error"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"The request did not arrive within {limit_s:g} s.")


class HeadTooLarge(RouterFault):
    """The request's target and headers are above the limit."""

    status, code, kind = 431, "headers_too_large", "invalid_request_error"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request has too many headers, or more than {limit_bytes} bytes of them.")


class TooManyConnections(RouterFault):
    """As many clients are connected as may."""

    status, code, retry_after_s = 503, "too_many_connections", 1

    def __init__(self) -> None:
        super().__init__("The router holds as many connections as it may; try again in a moment.")


class NoEngineAvailable(RouterFault):
    """No engine of a needed role is up."""

    status, code, retry_after_s = 503, "no_engine_available", 1

    def __init__(self, role: Role) -> None:
        super().__init__(f"No {role} engine is up that takes new turns.")


class TooManyTurns(RouterFault):
    """As many turns run and wait as may."""

    status, code, kind, retry_after_s = 429, "too_many_turns", "rate_limit_error", 1

    def __init__(self) -> None:
        super().__init__("The router serves as many turns as it may; try again in a moment.")


class ShuttingDown(RouterFault):
    """The router takes no new turns any more, or not yet."""

    status, code, retry_after_s = 503, "shutting_down", 1

    def __init__(self) -> None:
        super().__init__("The router is stopping or starting and takes no turns; try again in a moment.")


class UpstreamFault(RouterFault):
    """An engine's connection failed; nothing says whether the engine worked on the request."""

    status, code = 502, "engine_failed"


class UpstreamConnectFailed(UpstreamFault):
    """An engine could not be reached at all."""

    code = "engine_unreachable"


class EngineRefusesRouter(UpstreamFault):
    """An engine refuses the credential that the router sends instead of the client's: the operator has to act."""

    code = "engine_refuses_router"

    def __init__(self) -> None:
        super().__init__("An engine refuses the router's credential (setting 'upstream_api_key').")


class UpstreamTimedOut(UpstreamFault):
    """An engine did not answer in time."""

    status, code = 504, "engine_timed_out"


class ClientGone(Exception):  # noqa: N818
    """The client closed the connection: nobody is left to tell."""
