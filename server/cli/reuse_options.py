"""Options about how much is reused, shared by the commands that start engines."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from bidikv_server.launch.recipe import ReuseSettings

_DEFAULTS = ReuseSettings()


def _threshold(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if text.isdecimal():
        return int(text)
    raise typer.BadParameter(f"{text!r} is neither a number of tokens nor auto")


TtlOption = Annotated[
    float,
    typer.Option(
        "--retention-ttl", min=0.1, help="Longest time that decode keeps a turn's blocks, in seconds."
    ),
]
ThresholdOption = Annotated[
    str,
    typer.Option(
        "--recompute-threshold",
        callback=lambda text: str(_threshold(text)),
        metavar="TOKENS|auto",
        help="Prefill computes what a pull would save fewer tokens of. auto: learnt for each pair of engines.",
    ),
]
ShareOption = Annotated[
    float,
    typer.Option(
        "--protected-share",
        min=0,
        max=0.9,
        help="Largest share of decode's blocks held for conversations that said when they come back.",
    ),
]

DEFAULT_TTL_S = _DEFAULTS.retention_ttl_s
DEFAULT_THRESHOLD = str(_DEFAULTS.recompute_threshold)
DEFAULT_SHARE = _DEFAULTS.protected_share


def settings(
    *, ttl_s: float = DEFAULT_TTL_S, threshold: str = DEFAULT_THRESHOLD, share: float = DEFAULT_SHARE
) -> ReuseSettings:
    """What the options' values mean."""
    return ReuseSettings(ttl_s, _threshold(threshold), share)
