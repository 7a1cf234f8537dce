"""Where a prompt is computed: policies to choose from, each a pure function of the engines that may."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bidikv_server.router.core.choices import PrefillChoice

if TYPE_CHECKING:
    from bidikv_server.router.core.choices import PrefillOption

_PULL_WEIGHT: Final = 0.25
"""What a pulled token counts against a computed one while neither was measured."""


def cached_prefix(options: tuple[PrefillOption, ...]) -> tuple[PrefillOption, PrefillChoice]:
    """The engine that will be done first, with what it has cached and what it has to do.

    By measured seconds if all engines have them, else by tokens: those ahead of the leg, those to compute, and, at a quarter
    each, those to pull.
    """
    if len(options) == 1:
        return options[0], PrefillChoice.ONLY
    if all(option.expected_s is not None for option in options):
        chosen = min(options, key=lambda option: (option.expected_s, option.engine.load))
    else:
        chosen = min(options, key=lambda option: (_work(option), option.engine.load))
    most = max(option.cached_tokens for option in options)
    cached = 0 < most == chosen.cached_tokens
    return chosen, PrefillChoice.CACHED_PREFIX if cached else PrefillChoice.LEAST_LOADED


def least_loaded(options: tuple[PrefillOption, ...]) -> tuple[PrefillOption, PrefillChoice]:
    """The engine with the fewest requests, whatever it has cached."""
    chosen = min(options, key=lambda option: option.engine.load)
    return chosen, PrefillChoice.ONLY if len(options) == 1 else PrefillChoice.LEAST_LOADED


def _work(option: PrefillOption) -> float:
    return option.engine.backlog_tokens + option.computed_tokens + _PULL_WEIGHT * option.pulled_tokens
