"""What the served model can do, asked once before a plan is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from bidikv.headers import READBACK_HEADER, SESSION_HEADER
from bidikv_server.verify import prompts
from bidikv_server.verify.client import FailureKind, RequestFailed
from bidikv_server.verify.options import UsageError
from bidikv_server.verify.plan import Features
from bidikv_server.verify.requests import CHAT_PATH, COMPLETIONS_PATH, Request, tool_fields

if TYPE_CHECKING:
    from bidikv_server.verify.answers import Answer
    from bidikv_server.verify.client import Client

_UNKNOWN_LENGTH: Final = 4096
"""Where the router's model list tells none, which vLLM's always does."""
_SHORTEST: Final = 256


@dataclass(frozen=True, slots=True)
class Served:
    """The model behind the router."""

    model: str
    features: Features


async def probe(client: Client, base_url: str) -> Served:
    """Ask for the model and try what it takes.

    Raises:
        UsageError: There is no usable router or model at this address.
    """
    models = await client.models()
    if models is None:
        raise UsageError(
            f"no bidikv router answers at {base_url}: start one with `bidikv up`, or check --base-url."
        )
    if not models:
        raise UsageError(f"the router at {base_url} serves no model.")
    model, length = str(models[0]["id"]), models[0].get("max_model_len") or _UNKNOWN_LENGTH
    if length < _SHORTEST:
        raise UsageError(f"{model} takes {length} tokens at most; at least {_SHORTEST} are needed.")
    user = {"role": "user", "content": "Say hello."}
    plain = await _try(client, model, CHAT_PATH, {"messages": [user]})
    if plain is None:
        raise UsageError(f"{model} at {base_url} refuses a chat completion.")
    system = {"role": "system", "content": prompts.SYSTEM}
    called = await _try(client, model, CHAT_PATH, {"messages": [user], **tool_fields(call=True)}, 40)
    features = Features(
        max_model_len=int(length),
        tools=called is not None and called.arguments is not None,
        system=await _try(client, model, CHAT_PATH, {"messages": [system, user]}) is not None,
        completions=await _try(client, model, COMPLETIONS_PATH, {"prompt": "Hello"}) is not None,
        token_ids=bool(plain.token_ids),
    )
    return Served(model, features)


async def _try(
    client: Client, model: str, path: str, fields: dict[str, Any], max_tokens: int = 4
) -> Answer | None:
    """The answer; None if the request is refused."""
    nonce = uuid4().hex
    body = {"model": model, "max_tokens": max_tokens, "temperature": 0, "stream": True, "cache_salt": nonce}
    headers = {SESSION_HEADER: f"probe-{nonce}", READBACK_HEADER: "off"}
    try:
        return await client.ask(Request(path, {**body, "return_token_ids": True, **fields}, headers))
    except RequestFailed as failed:
        refused = failed.status is not None and 400 <= failed.status < 500
        if refused or failed.kind is FailureKind.ERROR_EVENT:
            return None
        raise UsageError(
            f"the first request failed ({failed}); see `bidikv doctor` and the engines' logs."
        ) from None
