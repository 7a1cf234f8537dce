"""vLLM's MooncakeConnector: both legs carry one transfer id, and decode asks prefill's bootstrap server for the KV.

Prefill answers nothing that decode needs. Who prefill is, its bootstrap server tells: one engine id for each
data-parallel rank. So both legs are sent at once, the prefill leg to the rank whose id decode was given.
"""

from __future__ import annotations

import itertools
import json
import logging
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from bidikv_server.router.core.accounts import read_prefill_answer
from bidikv_server.router.core.engines import Role
from bidikv_server.router.core.ids import EngineUrl
from bidikv_server.router.core.outcomes import cached_only
from bidikv_server.router.core.paths import CHAT_PATH, COMPLETIONS_PATH
from bidikv_server.router.errors import UpstreamFault
from bidikv_server.router.transfer.names import MOONCAKE
from bidikv_server.router.transfer.system import Forward, Leg, LegOrder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bidikv.headers import ReuseHeader
    from bidikv_server.reasons import Reason
    from bidikv_server.router.core.accounts import PrefillAnswer
    from bidikv_server.router.transfer.system import Attempt
    from bidikv_server.router.upstream import EngineClient

_log = logging.getLogger(__name__)
BOOTSTRAP_PORT: Final = 8998
"""vLLM's default of VLLM_MOONCAKE_BOOTSTRAP_PORT."""
_RANK_HEADER: Final = "X-data-parallel-rank"
_WITH_MIN_TOKENS: Final = frozenset({CHAT_PATH, COMPLETIONS_PATH})
"""Endpoints where prefill can be kept from ending at its first token."""


def bootstrap_of(url: str) -> str:
    """Where a prefill engine's bootstrap server is by default: on its host."""
    host = urlsplit(url).hostname or ""
    return f"http://[{host}]:{BOOTSTRAP_PORT}" if ":" in host else f"http://{host}:{BOOTSTRAP_PORT}"


def parse_ranks(raw: bytes) -> dict[int, str]:
    """Engine ids by data-parallel rank, from a bootstrap server's answer.

    Raises:
        ValueError: It is not one.
    """
    try:
        return {int(rank): entry["engine_id"] for rank, entry in json.loads(raw).items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("not a bootstrap server's answer") from error


class Mooncake:
    """Knows the engine ids of every prefill engine that is up."""

    name = MOONCAKE
    order = LegOrder.AT_ONCE

    def __init__(self, client: EngineClient, bootstrap: Mapping[str, str], *, timeout_s: float) -> None:
        """Ask these bootstrap servers.

        Args:
            client: Connections.
            bootstrap: Base URLs of bootstrap servers by those of their prefill engines, where they are not the default.
            timeout_s: For one question.
        """
        self._client = client
        self._bootstrap = bootstrap
        self._timeout_s = timeout_s
        self._ranks: dict[EngineUrl, dict[int, str]] = {}
        self._silent: set[EngineUrl] = set()
        self._turns = itertools.count()

    async def begin(self, attempt: Attempt) -> MooncakeTransfer:
        """Choose a rank of the planned prefill engine.

        Raises:
            UpstreamFault: Its bootstrap server does not say who it is.
        """
        prefill = attempt.plan.prefill
        if prefill is None:
            return MooncakeTransfer(None)
        if not self._ranks.get(prefill.url):
            await self._learn(prefill.url)
        ranks = self._ranks.get(prefill.url)
        bootstrap = self._bootstrap_of(prefill.url)
        if not ranks:
            raise UpstreamFault(f"The bootstrap server {bootstrap} of {prefill.url} names no engine.")
        rank = sorted(ranks)[next(self._turns) % len(ranks)]
        params = {
            "remote_engine_id": ranks[rank],
            "remote_bootstrap_addr": bootstrap,
            "transfer_id": f"xfer-{uuid.uuid4().hex}",
        }
        return MooncakeTransfer(params, rank if len(ranks) > 1 else None, attempt.request.path)

    async def probe(self, url: EngineUrl, role: Role) -> None:
        """Ask a prefill engine's bootstrap server: a restarted engine has another id."""
        if role is Role.PREFILL:
            await self._learn(url)

    def engine_down(self, url: EngineUrl) -> None:
        """Forget its ids."""
        self._ranks.pop(url, None)

    async def _learn(self, url: EngineUrl) -> None:
        bootstrap = self._bootstrap_of(url)
        try:
            answer = await self._client.get(EngineUrl(bootstrap), "/query", timeout_s=self._timeout_s)
            self._ranks[url] = parse_ranks(answer.body)
        except (UpstreamFault, ValueError) as error:
            self._ranks.pop(url, None)
            if url not in self._silent:
                self._silent.add(url)
                _log.warning(
                    "the bootstrap server %s of %s does not say who that is (%s): set mooncake_bootstrap",
                    bootstrap,
                    url,
                    error,
                )
        else:
            self._silent.discard(url)

    def _bootstrap_of(self, url: EngineUrl) -> str:
        return self._bootstrap.get(url) or bootstrap_of(url)


@dataclass(frozen=True, slots=True)
class MooncakeTransfer(Forward):
    """One attempt.

    Attributes:
        params: What both legs and prefill's place have in common; None when decode runs alone.
        rank: Data-parallel rank that computes; None if there is but one.
        path: Endpoint.
    """

    params: Mapping[str, Any] | None
    rank: int | None = None
    path: str = CHAT_PATH

    @property
    def prefill(self) -> Leg:
        """Compute and keep under the transfer id. An answer that ends otherwise than by length is kept for nobody."""
        transfer_id = self.params["transfer_id"] if self.params is not None else None
        return Leg(
            {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id},
            headers={} if self.rank is None else {_RANK_HEADER: str(self.rank)},
            fields={"min_tokens": 1} if self.path in _WITH_MIN_TOKENS else {},
        )

    def read_prefill(self, raw: bytes) -> PrefillAnswer:
        """The usage.

        Raises:
            ValueError: Prefill keeps nothing for decode, which would wait for it in vain.
        """
        answer = read_prefill_answer(raw)
        if not _ended_by_length(raw):
            raise ValueError("prefill ended otherwise than by length")
        return replace(answer, handle=dict(self.params or {}), token_ids=None)

    def decode(self, prefilled: PrefillAnswer) -> Leg:  # noqa: ARG002  (all is known beforehand)
        """Where to ask for the transfer; nothing when decode runs alone."""
        if self.params is None:
            return Leg()
        return Leg({"do_remote_decode": False, "do_remote_prefill": True, **self.params})

    def account(self, prefilled: PrefillAnswer, decided: Reason | None) -> ReuseHeader:
        """Only prefill's own prefix cache can have helped."""
        return cached_only(prefilled, decided)


def _ended_by_length(raw: bytes) -> bool:
    """Whether the one token that was asked for ended the answer, as each API says it."""
    answer = json.loads(raw)
    if answer.get("stop_reason") == "max_tokens" or answer.get("status") == "incomplete":
        return True
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, dict) and first.get("finish_reason") == "length"
