"""Whether turns are traced, and what tracing is to the rest of the router. `otel.py` does it, once it is asked for."""

from __future__ import annotations

import logging
import os
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from bidikv_server.router.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bidikv_server.router.core.engines import Role
    from bidikv_server.router.core.ids import EngineUrl
    from bidikv_server.router.core.reports import LegReport, TurnReport

_log = logging.getLogger(__name__)
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
_ASKED_BY: Final = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_TRACES_EXPORTER",
)
"""Variables of OpenTelemetry that say where spans should go."""
_MISSING: Final = 'OpenTelemetry is not installed: pip install "bidikv[otel]"'


class LegTrace(Protocol):
    """One leg's span."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What tells the engine of it."""

    def end(self, leg: LegReport) -> None:
        """The leg has ended."""


class TurnTrace(Protocol):
    """One turn's span."""

    @property
    def trace_id(self) -> str | None:
        """32 hex digits; None if there is no span."""

    @property
    def wants_answer(self) -> bool:
        """The answer's bytes should be looked at for its id and usage."""

    def leg(self, role: Role, engine: EngineUrl) -> LegTrace:
        """A leg begins."""

    def end(self, report: TurnReport) -> None:
        """The turn has ended."""


class Tracing(Protocol):
    """Makes spans."""

    def turn(self, path: str, headers: Mapping[str, str]) -> TurnTrace:
        """A turn begins, under the client's span if its headers name one."""

    def close(self) -> None:
        """Send what is left; may wait for the collector. Blocks."""


class NoTracing:
    """No spans. All three protocols in one: each method does nothing."""

    headers: Mapping[str, str] = _NO_HEADERS
    trace_id: str | None = None
    wants_answer = False

    def turn(self, _path: str, _headers: Mapping[str, str]) -> TurnTrace:
        """Nothing begins."""
        return self

    def leg(self, _role: Role, _engine: EngineUrl) -> LegTrace:
        """Nothing begins."""
        return self

    def end(self, _report: object) -> None:
        """Nothing ends."""

    def close(self) -> None:
        """Nothing is left."""


def open_tracing(switch: str) -> Tracing:
    """Begin tracing if it is asked for: by the setting `on`, or under `auto` by a variable of OpenTelemetry's.

    Variables may be meant for every program of a machine, so where they alone ask, a missing package is a warning.

    Raises:
        SettingsError: Turns should be traced and cannot be.
    """
    asked_by = next((name for name in _ASKED_BY if os.environ.get(name)), None)
    if switch == "off" or (switch == "auto" and (asked_by is None or _is_disabled())):
        return NoTracing()
    try:
        from bidikv_server.router.otel import start_tracing  # noqa: PLC0415  (an optional extra)
    except ImportError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        if switch == "on":
            raise SettingsError(f"tracing: {_MISSING}") from None
        _log.warning("%s is set, but turns are not traced: %s", asked_by, _MISSING)
        return NoTracing()
    return start_tracing()


def _is_disabled() -> bool:
    return (
        os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        or os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"
    )
