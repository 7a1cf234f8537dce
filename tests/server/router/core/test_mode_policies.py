"""How turns get their prompts' KV, policy by policy."""

import pytest

from bidikv_server.router.core.choices import Mode, ModeReason, ModeView
from bidikv_server.router.core.mode_policies import Cheapest, readback


def view(readback_s=1.0, **fields):
    return ModeView(readback_s=readback_s, **{"new_tokens": 100, **fields})


def test_readback():
    """It weighs nothing."""
    assert readback(view(recompute_s=0.0, alone_s=0.0)) == (Mode.READBACK, ModeReason.FIXED)


@pytest.mark.parametrize(
    ("seen", "mode"),
    [
        (view(), Mode.READBACK),
        (view(recompute_s=0.95, alone_s=0.95), Mode.READBACK),
        (view(recompute_s=0.5), Mode.RECOMPUTE),
        (view(recompute_s=0.5, alone_s=0.4), Mode.ALONE),
        (view(alone_s=0.4, new_tokens=256), Mode.ALONE),
        (view(alone_s=0.4, new_tokens=257), Mode.READBACK),
        (view(alone_s=0.4, new_tokens=None), Mode.READBACK),
        (view(alone_s=0.4, waiting=1), Mode.READBACK),
        (view(recompute_s=0.5, alone_s=0.4, waiting=1), Mode.RECOMPUTE),
    ],
)
def test_cheapest(seen, mode):
    """What is clearly faster, and alone only with few tokens on an engine that keeps nobody waiting."""
    assert Cheapest()(seen) == (mode, ModeReason.CHEAPER)


def test_unknown_costs():
    """Readback while it is not known what that takes."""
    assert Cheapest()(view(None, alone_s=0.1)) == (Mode.READBACK, ModeReason.UNKNOWN_COSTS)
