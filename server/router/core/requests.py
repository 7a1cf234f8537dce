"""What a client asks for: its body and headers, checked and placed, before any engine is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from bidikv.headers import READBACK_HEADER, TURN_HEADER, TurnHeader
from bidikv_server.router.core import bulk
from bidikv_server.router.core.content import Media, media_of
from bidikv_server.router.core.digests import Chain, chain
from bidikv_server.router.core.identity import Identity, identify
from bidikv_server.router.core.ids import Scope, cache_salt_of, tenant_of
from bidikv_server.router.core.json_bytes import InvalidJson, JsonObject, NotAnObject, read_object
from bidikv_server.router.core.paths import CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH, RESPONSES_PATH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bidikv_server.router.core.kept import Kept

__all__ = ["CHAT_PATH", "COMPLETIONS_PATH", "InvalidRequest", "TurnRequest", "continued", "read_request"]

_PROMPT_FIELD: Final = {CHAT_PATH: "messages", MESSAGES_PATH: "messages", RESPONSES_PATH: "input"}


class InvalidRequest(ValueError):  # noqa: N818
    """A request that no engine could serve.

    Attributes:
        param: The body field at fault, if one is.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One request for one turn.

    Attributes:
        path: Endpoint, the same at the engines.
        body: The client's body as it came; never edited.
        scope: Whose it is.
        identity: The conversation the client named, and how.
        chain: Digests of its prompt.
        media: What of its prompt is no text.
        turn: The client's advice on this turn.
        readback: The client did not switch reuse off for this request.
        cache_salt: `cache_salt` for both legs in place of the client's own; None leaves the body as it is.
        response_id: Name that the engine shall give its answer (Responses API); None where answers have none of ours.
        kept: The earlier response that this request goes on from, and the engine that keeps it.
    """

    path: str
    body: Mapping[str, Any]
    scope: Scope
    identity: Identity
    chain: Chain
    media: Media
    turn: TurnHeader
    readback: bool
    cache_salt: str | None = None
    response_id: str | None = None
    kept: Kept | None = None

    @property
    def session(self) -> str | None:
        """The conversation's name; None if the client gave none that can be used."""
        return self.identity.session

    @property
    def recorded(self) -> bool:
        """The turn takes a place in its conversation."""
        return self.turn.kind != "aux"

    @property
    def previous_response(self) -> str | None:
        """Name of the earlier response that stands for the history."""
        return self.body.get("previous_response_id") if self.path == RESPONSES_PATH else None

    @property
    def stored(self) -> bool:
        """The client may come back to the answer by its name."""
        return self.response_id is not None and self.body.get("store") is not False

    @property
    def background(self) -> bool:
        """The engine works on after it has answered."""
        return self.path == RESPONSES_PATH and bool(self.body.get("background"))


def read_request(
    path: str,
    raw: bytes,
    headers: Mapping[str, str],
    *,
    tenant: str | None = None,
    normalise: bool = True,
) -> TurnRequest:
    """Check and place a request.

    Args:
        path: Endpoint.
        raw: The body's bytes.
        headers: By lower-case name.
        tenant: Name of the caller's tenant; None makes every credential a tenant of its own.
        normalise: Find the conversation in spite of what clients change in a history by themselves.

    Raises:
        InvalidRequest: The client has to change something.
    """
    body = _parse(raw)
    _require(path, body)
    if (crowded := bulk.crowded_field(raw, body)) is not None:
        raise InvalidRequest(
            f"The field {crowded!r} has more than {bulk.MAX_ITEMS} messages, parts, calls or tools.", crowded
        )
    if tenant is not None:
        _require_salt(body.get("cache_salt"))
    scope = Scope(
        tenant=tenant_of(credential_of(headers)) if tenant is None else tenant,
        model=body["model"],
        cache_salt=salt if isinstance(salt := body.get("cache_salt"), str) else "",
    )
    identity, turn = identify(body, headers), TurnHeader.parse(headers.get(TURN_HEADER))
    return TurnRequest(
        path=path,
        body=body,
        scope=scope,
        identity=identity,
        chain=chain(body, scope, path, normalise=normalise),
        media=media_of(body),
        turn=replace(turn, final=True) if identity.final else turn,
        readback=headers.get(READBACK_HEADER, "").strip().lower() != "off",
        cache_salt=cache_salt_of(tenant, scope.cache_salt) if tenant is not None else None,
    )


def continued(request: TurnRequest, kept: Kept, *, normalise: bool = True) -> TurnRequest:
    """The same request as one that goes on from an earlier response, whose prompt its body does not repeat."""
    after = chain(request.body, request.scope, request.path, normalise=normalise, after=kept.digest)
    return replace(request, kept=kept, chain=after)


def credential_of(headers: Mapping[str, str]) -> str | None:
    """The credential that a request carries: `Authorization`, else Anthropic's `x-api-key`."""
    return headers.get("authorization") or headers.get("x-api-key")


def _parse(raw: bytes) -> JsonObject:
    if bulk.has_too_many_values(raw):
        raise InvalidRequest(f"The request body has more than {bulk.MAX_VALUES} values.")
    try:
        return read_object(raw)
    except NotAnObject:
        raise InvalidRequest("The request body must be a JSON object.") from None
    except InvalidJson as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.") from None


def _require_salt(salt: Any) -> None:
    """Refuse what engines would: they never see the client's own."""
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise InvalidRequest("The field 'cache_salt' must be a non-empty string.", "cache_salt")


def _require(path: str, body: Mapping[str, Any]) -> None:
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise InvalidRequest("The field 'model' is required and must be a string.", "model")
    field = _PROMPT_FIELD.get(path, "prompt")
    if field == "messages" and not isinstance(body.get("messages"), list):
        raise InvalidRequest("The field 'messages' is required and must be a list.", "messages")
    if field == "input" and not isinstance(body.get("input"), str | list):
        raise InvalidRequest("The field 'input' is required and must be a string or a list.", "input")
    previous = body.get("previous_response_id")
    if path == RESPONSES_PATH and previous is not None and not isinstance(previous, str):
        raise InvalidRequest("The field 'previous_response_id' must be a string.", "previous_response_id")
    if path == COMPLETIONS_PATH and "prompt" not in body and "prompt_embeds" not in body:
        raise InvalidRequest("The field 'prompt' is required.", "prompt")
