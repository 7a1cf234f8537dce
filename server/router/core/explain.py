"""What the admin API shows of conversations: plain values, built from what the table and the history remember."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bidikv_server.router.core.advice import advise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bidikv_server.router.core.conversations import Turn
    from bidikv_server.router.core.history import Known, TurnRecord


def summary(known: Known, turns: int, now_s: float) -> dict[str, Any]:
    """One conversation in a list.

    Args:
        known: What is remembered of it.
        turns: How many of its turns are in the table.
        now_s: Now, on the clock of its records.
    """
    latest = known.records[-1]
    return {
        "key": known.key,
        "tenant": known.tenant,
        "model": known.model,
        "turns": turns,
        "decode": latest.decode,
        "idle_s": _seconds(now_s - latest.at_s),
        "latest": {
            "reason": latest.reason,
            "prompt_tokens": latest.prompt_tokens,
            "remote_tokens": latest.remote_tokens,
            "local_tokens": latest.local_tokens,
            "computed_tokens": latest.computed_tokens,
            "ttft_s": round(latest.ttft_s, 6),
        },
    }


def explanation(known: Known, turns: Sequence[Turn], now_s: float, wall_s: float) -> dict[str, Any]:
    """One conversation in full: its turns as a tree (each names its parent), and what became of the last ones.

    Args:
        known: What is remembered of it.
        turns: Its turns in the table, oldest first.
        now_s: Now, on the clock of its records.
        wall_s: The same moment in seconds since 1970.
    """
    return {
        **summary(known, len(turns), now_s),
        "tree": [
            {
                "turn": turn.digest.hex(),
                "parent": turn.parent.hex() if turn.parent is not None else None,
                "messages": turn.depth,
                "decode": turn.holder.engine,
            }
            for turn in turns
        ],
        "recent": [_told(record, now_s, wall_s) for record in reversed(known.records)],
    }


def _told(record: TurnRecord, now_s: float, wall_s: float) -> dict[str, Any]:
    return {
        "turn": record.turn.hex() or None,
        "time_s": round(wall_s - (now_s - record.at_s), 3),
        "reason": record.reason,
        "advice": advise(record.reason, record.diverged_at_token),
        "prompt_tokens": record.prompt_tokens,
        "remote_tokens": record.remote_tokens,
        "local_tokens": record.local_tokens,
        "computed_tokens": record.computed_tokens,
        "diverged_at_token": record.diverged_at_token,
        "prefill": record.prefill,
        "decode": record.decode,
        "placement": record.placement,
        "prefill_choice": record.prefill_choice,
        "mode": record.mode,
        "mode_reason": record.mode_reason,
        "ttft_s": round(record.ttft_s, 6),
    }


def _seconds(duration_s: float) -> float:
    return round(max(0.0, duration_s), 3)
