"""What a caller may ask of its own conversations, under /v1/bidikv/: why turns reused what they reused, and to end one.

A conversation goes by the key that every answer of it carries (`x-bidikv-session`), and is reached with the credential of its
turns only. Unlike the admin API this needs no setting: it shows nobody anything that is not theirs.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from bidikv_server.router.core.ids import ConversationKey
from bidikv_server.router.core.json_bytes import InvalidJson, read_value
from bidikv_server.router.errors import BadRequest, MethodNotAllowed, NotFound
from bidikv_server.router.replies import headers_of

if TYPE_CHECKING:
    from bidikv_server.router.access import Access
    from bidikv_server.router.admin import AdminRoutes
    from bidikv_server.router.releases import Releaser
    from bidikv_server.router.replies import Endpoint, Reply, Scope

PREFIX: Final = "/v1/bidikv/"
_ONE: Final = re.compile(re.escape(PREFIX) + r"conversations/([0-9a-f]{32})(/wait)?")
_MOST_S: Final = 2.0**63
"""More than anybody waits; JSON has whole numbers that no float can hold."""


class OwnRoutes:
    """One method per endpoint. Conversations are kept by the admin API, which sees all of them."""

    def __init__(
        self, conversations: AdminRoutes, *, access: Access, releaser: Releaser, max_ttl_s: float
    ) -> None:
        self._conversations = conversations
        self._access = access
        self._releaser = releaser
        self._max_ttl_s = max_ttl_s

    def endpoint(self, scope: Scope) -> Endpoint:
        """The endpoint of a request. Reads no body.

        Raises:
            NotFound: There is none.
            Unauthorized: API keys are configured, and the request carries none of them.
            MethodNotAllowed: It takes other methods.
        """
        asked = _ONE.fullmatch(scope["path"])
        if asked is None:
            raise NotFound(f"There is no endpoint {scope['path']}.")
        # The same name that its turns go by, whatever header carries the credential.
        owner, key = self._access.share(headers_of(scope)), ConversationKey(asked[1])
        methods: dict[str, Endpoint] = (
            {"POST": lambda _scope, raw, reply: self._wait(owner, key, raw, reply)}
            if asked[2]
            else {
                "GET": lambda _scope, _raw, reply: self._conversations.explain_own(owner, key, reply),
                "DELETE": lambda _scope, _raw, reply: self._conversations.release_own(owner, key, reply),
            }
        )
        endpoint = methods.get(scope["method"])
        if endpoint is None:
            raise MethodNotAllowed(f"{scope['path']} does not take {scope['method']}.")
        return endpoint

    async def _wait(self, tenant: str, key: ConversationKey, raw: bytes, reply: Reply) -> None:
        """POST conversations/{key}/wait: the next turn takes `wait_s` to come; decode keeps what it holds until then."""
        wait_s = min(_seconds(raw), self._max_ttl_s)
        addresses = await self._conversations.holders_of_own(tenant, key)
        outcomes = await self._releaser.renew(addresses, key, wait_s)
        await reply.json(200, {"key": key, "wait_s": wait_s, "decode": outcomes})


def _seconds(raw: bytes) -> float:
    try:
        body: Any = read_value(raw)
    except (InvalidJson, RecursionError):
        raise BadRequest("The request body is not valid JSON.") from None
    wait_s = body.get("wait_s") if isinstance(body, dict) else None
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 < wait_s < _MOST_S:
        raise BadRequest(
            "The field 'wait_s' is required and must be a number of seconds above 0.", param="wait_s"
        )
    return float(wait_s)
