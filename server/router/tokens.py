"""Decode legs with the prompt's tokens from prefill, counted by where decode's tokens come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bidikv_server.router.core import prompt_tokens
from bidikv_server.router.core.bodies import decode_body
from bidikv_server.router.core.json_bytes import encode_from
from bidikv_server.router.core.prompt_tokens import Tokenised

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bidikv_server.router.core.requests import TurnRequest
    from bidikv_server.router.metrics import RouterMetrics
    from bidikv_server.router.settings import RouterSettings


class PromptTokens:
    """Says who finds a prompt's tokens, and writes decode legs accordingly."""

    def __init__(self, settings: RouterSettings, metrics: RouterMetrics) -> None:
        self._wanted = settings.tokenise_once
        self._metrics = metrics

    def obstacle(self, request: TurnRequest) -> Tokenised | None:
        """Why decode has to find the tokens itself; None lets it take prefill's."""
        if not self._wanted:
            return Tokenised.OFF
        return prompt_tokens.obstacle(request.path, request.body, has_media=request.media.present)

    def body(
        self,
        request: TurnRequest,
        params: dict[str, Any] | None,
        token_ids: bytes | None,
        obstacle: Tokenised | None,
        fields: Mapping[str, Any],
    ) -> bytes:
        """A decode leg's body as JSON.

        Args:
            request: What the client asks for.
            params: The leg's `kv_transfer_params`; None without a handle.
            token_ids: What prefill said of the prompt's tokens.
            obstacle: Why they are of no use.
            fields: Body fields over the client's.
        """
        body = {**decode_body(request, params), **fields}
        if params is None:
            return encode_from(request.body, body)
        if obstacle is None and token_ids is not None:
            self._metrics.tokenisations.labels(Tokenised.ONCE).inc()
            body = prompt_tokens.with_token_ids(request.path, body, token_ids)
            return encode_from(request.body, body)
        self._metrics.tokenisations.labels(obstacle or Tokenised.NOT_RETURNED).inc()
        return encode_from(request.body, body)
