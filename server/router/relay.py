"""Passing a decode engine's answer on: bytes untouched, watched as they go, and never a silent end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bidikv_server.router.core.answers import LastEventHolder
from bidikv_server.router.core.sse import SseScanner
from bidikv_server.router.errors import RouterFault, UpstreamFault
from bidikv_server.router.upstream import Answer, StreamedAnswer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bidikv_server.router.core.engines import Role
    from bidikv_server.router.replies import Reply
    from bidikv_server.router.transfer.system import Show


class LegFailed(Exception):  # noqa: N818
    """A leg failed before the client saw anything.

    Attributes:
        fault: What to tell the client if nothing else helps.
        answer: The engine's own error answer, which is better to tell; None if it gave none.
        refused: The engine takes no more for now, and said so; it is not broken.
        retry_after_s: When it asks to be tried again; None if it does not say.
    """

    def __init__(
        self,
        fault: RouterFault,
        answer: Answer | None = None,
        *,
        refused: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(str(fault))
        self.fault = fault
        self.answer = answer
        self.refused = refused
        self.retry_after_s = retry_after_s


class RefusedByEngine(Exception):  # noqa: N818
    """An engine says that the request itself is wrong: the client gets its answer as it is.

    Attributes:
        answer: What it says.
        role: Of the engine, once that is known.
    """

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer
        self.role: Role | None = None


def check_answer(answer: Answer) -> None:
    """Sort out an engine's whole answer.

    Raises:
        RefusedByEngine: The request is at fault.
        LegFailed: The engine is at fault.
    """
    if answer.status in {429, 503}:
        fault = UpstreamFault(f"An engine takes no more for now (status {answer.status}).")
        raise LegFailed(fault, answer, refused=True, retry_after_s=_retry_after_s(answer))
    if answer.status >= 500:
        raise LegFailed(UpstreamFault(f"An engine answered with status {answer.status}."), answer)
    if answer.status != 200:
        raise RefusedByEngine(answer)
    if not answer.body:
        raise LegFailed(UpstreamFault("An engine answered with nothing."))


def _retry_after_s(answer: Answer) -> float | None:
    """What `Retry-After` says in seconds; a date counts as nothing said."""
    value = next((value for name, value in answer.headers if name == b"retry-after"), b"").strip()
    return float(value) if value.isdigit() and len(value) < 10 else None


async def relay(
    answer: StreamedAnswer,
    reply: Reply,
    on_success: Callable[[], Awaitable[None]],
    *,
    show: Show,
    last_resort: bool,
) -> str | None:
    """Pass an answer on.

    Args:
        answer: The engine's answer.
        reply: Where it goes.
        on_success: Awaited once the engine has ended its answer well, before the client can know. A client that has
            seen the end may hang up or send its next turn at once, and must find this one recorded.
        show: Makes what the client gets of a whole answer, before `on_success`.
        last_resort: Pass a stream on even if it begins with an error.

    Returns:
        None after a complete success, else the cause of the failure that the client was shown.

    Raises:
        RefusedByEngine: The request is at fault; the client saw nothing yet.
        LegFailed: The engine is at fault; the client saw nothing yet.
        UpstreamFault: The connection is at fault; the client saw nothing yet.
    """
    if answer.status == 200 and answer.is_event_stream:
        return await _relay_events(answer, reply, on_success, last_resort=last_resort)
    whole = Answer(answer.status, answer.headers, await answer.read())
    check_answer(whole)
    shown = show(whole.body, drop=reply.dialect.drops_null)
    await on_success()
    await reply.whole(whole.status, whole.headers, shown)
    return None


async def _relay_events(
    answer: StreamedAnswer, reply: Reply, on_success: Callable[[], Awaitable[None]], *, last_resort: bool
) -> str | None:
    if not answer.first:
        raise LegFailed(UpstreamFault("The engine's stream ended before its first byte."))
    scanner = SseScanner()
    scanner.feed(answer.first)
    if scanner.saw_error and not last_resort:
        whole = Answer(answer.status, answer.headers, await answer.read())
        raise LegFailed(UpstreamFault("The engine's stream began with an error."), whole)
    if scanner.ended_well:
        await on_success()
    last_event = reply.dialect.last_event
    holder = LastEventHolder(last_event) if last_event is not None else None
    await reply.start(answer.status, answer.headers)
    await _write(reply, holder, answer.first, scanner)
    fault = await _pump(answer, scanner, holder, reply, on_success)
    if holder is not None and (held := holder.end()):
        await reply.write(held)
    if fault is not None:
        gap = b"" if scanner.at_event_boundary else b"\n\n"
        await reply.write(gap + reply.dialect.error_event(fault, scanner.data_lines))
    await reply.end()
    if fault is not None:
        return "mid_stream"
    return None if scanner.ended_well else "engine_error_event"


async def _write(reply: Reply, holder: LastEventHolder | None, chunk: bytes, scanner: SseScanner) -> None:
    reply.events = scanner.data_lines
    if holder is None:
        await reply.write(chunk)
        return
    chunk = holder.feed(chunk)
    if scanner.saw_done:
        chunk += holder.end()
    if chunk:
        await reply.write(chunk)


async def _pump(
    answer: StreamedAnswer,
    scanner: SseScanner,
    holder: LastEventHolder | None,
    reply: Reply,
    on_success: Callable[[], Awaitable[None]],
) -> RouterFault | None:
    """Pass the rest of a stream on, chunk by chunk; what went wrong, if the client cannot see it in the stream."""
    known = scanner.ended_well
    try:
        async for chunk in answer.rest:
            scanner.feed(chunk)
            if scanner.ended_well and not known:
                known = True
                await on_success()
            await _write(reply, holder, chunk, scanner)
    except UpstreamFault as fault:
        return None if scanner.saw_done else fault
    scanner.end()
    if scanner.ended_well and not known:
        await on_success()
    if scanner.saw_done or scanner.saw_error:
        return None
    return UpstreamFault("The engine's stream ended early.")
