"""Mode policies that always go one way, for the comparison: `mode_policy = "fixed_modes:recompute"` and `:alone`."""

from __future__ import annotations

from bidikv_server.router.core.choices import Mode, ModeReason, ModeView


def recompute(_view: ModeView) -> tuple[Mode, ModeReason]:
    """Prefill asks no decode engine, and computes all that it has not cached."""
    return Mode.RECOMPUTE, ModeReason.FIXED


def alone(_view: ModeView) -> tuple[Mode, ModeReason]:
    """Decode does without prefill, whatever it has to compute."""
    return Mode.ALONE, ModeReason.FIXED
