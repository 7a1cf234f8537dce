"""Who plays turns: a relay of stock handles, written for this benchmark, and clients of our router."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from bidikv.headers import READBACK_HEADER, REUSE_HEADER, SESSION_HEADER, ReuseHeader
from bidikv_server import wire
from bidikv_server.verify.answers import Answer, AnswerBuilder
from comparison.calls import Event, Reply, events, page, post

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bidikv_server.launch.cluster import Cluster

_PULLED = "vllm:nixl_bytes_transferred_sum"


@dataclass(frozen=True, slots=True)
class Played:
    """One turn.

    Attributes:
        answer: What was generated.
        pulled_bytes: What prefill read from decode for it, by prefill's own metrics.
        handle: Whether the answer carried a stock handle for the next turn.
    """

    answer: Answer
    pulled_bytes: float
    handle: bool = False


class Player(Protocol):
    """Plays turns on one cluster."""

    name: str
    cluster: Cluster

    def play(
        self,
        body: Mapping[str, Any],
        *,
        session: str | None = None,
        stream: bool = False,
        timeout_s: float = 300.0,
    ) -> Played:
        """One turn of a session; without one it is a plain request of a client nobody knows."""

    def cold(self, body: Mapping[str, Any]) -> Answer:
        """The same request with nothing to reuse anywhere."""


class StockPlayer:
    """What a router for stock engines does: keep decode's handle by session, and give it to the next prefill, once.

    Requests that are not streamed carry the handle in the answer. vLLM's streams have no field for it.
    """

    name = "stock"

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._prefill, self._decode = cluster.prefill_urls[0], cluster.decode_urls[0]
        self._handles: dict[str, dict[str, Any]] = {}

    def play(
        self,
        body: Mapping[str, Any],
        *,
        session: str | None = None,
        stream: bool = False,
        timeout_s: float = 300.0,
    ) -> Played:
        """One turn. A handle is used at most once: decode frees its blocks after the read."""
        before = page(self._prefill).value(_PULLED)
        path = _path(body)
        handle = self._handles.pop(session, None) if session else None
        leg = {
            **body,
            "stream": False,
            "max_tokens": 1,
            "min_tokens": 0,
            "kv_transfer_params": handle or wire.NOTHING_TO_PULL,
        }
        prefilled = post(f"{self._prefill}{path}", leg, timeout_s=timeout_s)
        leg = {**body, "stream": stream, "kv_transfer_params": prefilled.body["kv_transfer_params"]}
        builder, after = AnswerBuilder(), None
        for part in _answer(f"{self._decode}{path}", leg, {}, timeout_s=timeout_s):
            builder.add(part)
            after = part.get("kv_transfer_params") or after
        if session and after:
            self._handles[session] = after
        pulled = page(self._prefill).value(_PULLED) - before
        return Played(builder.build(None), pulled, after is not None)

    def cold(self, body: Mapping[str, Any]) -> Answer:
        """Under a cache salt of its own, and without a handle."""
        return self.play({**body, "cache_salt": uuid.uuid4().hex}).answer


class OurPlayer:
    """A client of our router, with the session in its header."""

    name = "bidikv"

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._prefill = cluster.prefill_urls[0]

    def play(
        self,
        body: Mapping[str, Any],
        *,
        session: str | None = None,
        stream: bool = False,
        timeout_s: float = 300.0,
    ) -> Played:
        """One turn."""
        headers = {SESSION_HEADER: session or uuid.uuid4().hex}
        return self._play(body, headers, stream=stream, timeout_s=timeout_s)

    def cold(self, body: Mapping[str, Any]) -> Answer:
        """Under a cache salt and a session of its own, with readback switched off."""
        fresh = uuid.uuid4().hex
        headers = {SESSION_HEADER: fresh, READBACK_HEADER: "off"}
        return self._play({**body, "cache_salt": fresh}, headers, stream=False, timeout_s=300.0).answer

    def _play(
        self,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        *,
        stream: bool,
        timeout_s: float,
    ) -> Played:
        before = page(self._prefill).value(_PULLED)
        builder, reuse = AnswerBuilder(), None
        url = f"{self.cluster.router_url}{_path(body)}"
        if stream:
            for part in events(url, {**body, "stream": True}, headers, timeout_s=timeout_s):
                if isinstance(part, Reply):
                    reuse = ReuseHeader.parse(part.headers.get(REUSE_HEADER))
                else:
                    builder.add(part.body)
        else:
            reply = post(url, body, headers, timeout_s=timeout_s)
            reuse = ReuseHeader.parse(reply.headers.get(REUSE_HEADER))
            builder.add(reply.body)
        return Played(builder.build(reuse), page(self._prefill).value(_PULLED) - before)


def _answer(
    url: str, body: Mapping[str, Any], headers: Mapping[str, str], *, timeout_s: float
) -> Iterable[dict[str, Any]]:
    if not body["stream"]:
        return [post(url, body, headers, timeout_s=timeout_s).body]
    return (part.body for part in events(url, body, headers, timeout_s=timeout_s) if isinstance(part, Event))


def _path(body: Mapping[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"
