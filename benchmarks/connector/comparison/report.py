"""The table: what was measured, stock beside ours, and whether the targets were met. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from comparison.figures import costs_nothing, idle_is_free, lookup_is_fast, wrong_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from comparison.idle import Idle
    from comparison.pressure import Pressure
    from comparison.results import Result, Side

NOTES = (
    "Stock: vLLM's NixlConnector with bidirectional_kv_xfer, its handles relayed by this benchmark. Its NIXL agent is",
    "exchanged for our polling one, and its engines keep their cores, as ours do: without that each of its engines takes",
    "a whole core at any time. Nothing else of it is changed.",
)


_TARGET_SHARE: Final = 0.02


def lines(result: Result) -> Iterator[str]:
    """A Markdown table and what is to be known about it."""
    yield "| | stock | bidikv | target met |"
    yield "|---|---|---|---|"
    for what, stock, ours, met in _rows(result):
        yield f"| {what} | {stock} | {ours} | {_word(met)} |"
    if result.lookup:
        yield ""
        yield from _lookup_lines(result)
    yield ""
    yield from NOTES


def _rows(result: Result) -> Iterator[tuple[str, str, str, bool | str | None]]:
    stock, ours = result.stock, result.ours
    if stock.answers or ours.answers:
        right = not any(judged.wrong for judged in ours.answers)
        yield "wrong answers to changed histories", _wrong(stock), _wrong(ours), right
        right = not any(judged.plain_wrong for judged in ours.answers)
        yield "wrong answers to a plain request after each", _plain_wrong(stock), _plain_wrong(ours), right
    for streamed in (True, False):
        if pulled := _pulled(ours, streamed=streamed):
            name = "streamed" if streamed else "not streamed"
            met = None if not streamed else all(r.pulled == r.turns for r in ours.streaming if r.streamed)
            yield f"warm turns with readback, {name}", _pulled(stock, streamed=streamed), pulled, met
    if stock.idle or ours.idle:
        free = ours.idle is not None and idle_is_free(ours.idle.before, ours.idle.retaining)
        yield (
            "idle decode engine, core share before and while retaining",
            _idle(stock.idle),
            _idle(ours.idle),
            free,
        )
        none = ours.idle is not None and ours.idle.unavailable_blocks == 0
        yield (
            "blocks unavailable with nothing running",
            _unavailable(stock.idle),
            _unavailable(ours.idle),
            none,
        )
    if stock.pressure or ours.pressure:
        pressure = ours.pressure
        met = pressure is not None and pressure.answered == pressure.turns and not pressure.preemptions
        yield (
            "turns answered, asking for 1.5 times the blocks",
            _answered(stock.pressure),
            _answered(pressure),
            met,
        )
    for name, load in (("", result.throughput), (", tiny model", result.overhead)):
        if load:
            met = costs_nothing(load.throughput, load.per_token, load.preemptions)
            verdict = "too noisy" if met is None else met
            yield f"decode tokens/s, retention full / off{name}", "", str(load.throughput), verdict
            yield f"time per output token, full / off{name}", "", str(load.per_token), verdict
            yield f"processor time per output token, full / off{name}", "", str(load.cpu_per_token), None
            share = f"{load.hooks_share:.2%}"
            yield (
                f"engine thread's time in retention's hooks{name}",
                "",
                share,
                load.hooks_share < _TARGET_SHARE,
            )
            yield f"preemptions under that load{name}", "", str(load.preemptions), load.preemptions == 0


def _lookup_lines(result: Result) -> Iterator[str]:
    yield "| blocks | lookup (mean) | lookup | of it hashing | engine thread | round trip | validation | recording on decode | target met |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in result.lookup:
        met = lookup_is_fast(row.blocks, row.median_ms, row.validation_ms)
        times = (
            *(row.metric_mean_ms, row.median_ms, row.digests_ms, row.engine_thread_ms),
            *(row.round_trip_ms, row.validation_ms),
        )
        cells = " | ".join(f"{time:.1f} ms" for time in (*times, row.recording_ms))
        yield f"| {row.blocks} | {cells} | {_word(met)} |"


def _wrong(side: Side) -> str:
    return wrong_of([judged.wrong for judged in side.answers]) if side.answers else ""


def _plain_wrong(side: Side) -> str:
    return wrong_of([judged.plain_wrong for judged in side.answers]) if side.answers else ""


def _pulled(side: Side, *, streamed: bool) -> str:
    return next((f"{r.pulled} of {r.turns}" for r in side.streaming if r.streamed is streamed), "")


def _idle(idle: Idle | None) -> str:
    return f"{idle.before:.1%}, {idle.retaining:.1%}" if idle else ""


def _unavailable(idle: Idle | None) -> str:
    return f"{idle.unavailable_blocks} of {idle.blocks} ({idle.turns} turns)" if idle else ""


def _answered(pressure: Pressure | None) -> str:
    if pressure is None:
        return ""
    held = f"{pressure.unavailable_blocks} of {pressure.blocks} blocks held after it"
    return f"{pressure.answered} of {pressure.turns}, {pressure.preemptions} preemptions, {held}"


def _word(met: bool | str | None) -> str:  # noqa: FBT001
    if isinstance(met, str):
        return met
    return "" if met is None else "yes" if met else "NO"
