"""OpenTelemetry spans: one per turn and one per leg, in the GenAI conventions. The only user of `opentelemetry`.

Where spans go, how many are kept and what they say of this process is told by OpenTelemetry's own variables (OTEL_*).
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from bidikv_server.router.core.paths import COMPLETIONS_PATH
from bidikv_server.router.core.reports import OK
from bidikv_server.router.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import AttributeValue

    from bidikv_server.router.core.engines import Role
    from bidikv_server.router.core.ids import EngineUrl
    from bidikv_server.router.core.reports import LegReport, TurnReport

_log = logging.getLogger(__name__)
_GROUP: Final = "opentelemetry_traces_exporter"
_SERVICE: Final = "bidikv-router"
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_CLIENTS_DOING: Final = frozenset({"client_gone"})
"""Outcomes that are no error of the serving side."""


class OtelLegTrace:
    """One leg's span.

    Attributes:
        headers: `traceparent` and `tracestate` of it.
    """

    def __init__(self, span: Span) -> None:
        self.headers: dict[str, str] = {}
        self._span = span
        _PROPAGATOR.inject(self.headers, set_span_in_context(span))

    def end(self, leg: LegReport) -> None:
        """The leg has ended."""
        self._span.set_attribute("bidikv.leg.outcome", leg.outcome)
        _fail(self._span, leg.outcome)
        self._span.end()


class OtelTurnTrace:
    """One turn's span.

    Attributes:
        trace_id: 32 hex digits.
        wants_answer: The span is recorded, so the answer's id and usage are of use.
    """

    def __init__(self, tracer: Tracer, span: Span, operation: str) -> None:
        self.trace_id = format_trace_id(span.get_span_context().trace_id)
        self.wants_answer = span.is_recording()
        self._tracer = tracer
        self._span = span
        self._operation = operation

    def leg(self, role: Role, engine: EngineUrl) -> OtelLegTrace:
        """A leg begins."""
        parts = urlsplit(engine)
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": self._operation,
            "bidikv.leg": role.value,
            "server.address": parts.hostname or "",
            "server.port": parts.port or (443 if parts.scheme == "https" else 80),
        }
        span = self._tracer.start_span(
            f"{role.value} leg", set_span_in_context(self._span), SpanKind.CLIENT, attributes
        )
        return OtelLegTrace(span)

    def end(self, report: TurnReport) -> None:
        """The turn has ended."""
        if self._span.is_recording():
            if report.model is not None:
                self._span.update_name(f"{self._operation} {report.model}")
            self._span.set_attributes(
                {name: value for name, value in _attributes(report) if value is not None}
            )
            _fail(self._span, report.outcome)
        self._span.end()


class OtelTracing:
    """Makes spans and has them sent in the background."""

    def __init__(self, processor: SpanProcessor) -> None:
        """Trace through a processor.

        Args:
            processor: Takes spans as they end.
        """
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        )
        # A provider of our own, not the process's: two routers in one process stay apart.
        self._provider = TracerProvider(resource=Resource.create({} if named else {SERVICE_NAME: _SERVICE}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("bidikv_server.router")

    def turn(self, path: str, headers: Mapping[str, str]) -> OtelTurnTrace:
        """A turn begins, under the client's span if its headers name one."""
        operation = "text_completion" if path == COMPLETIONS_PATH else "chat"
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "vllm",
            "url.path": path,
        }
        parent = _PROPAGATOR.extract(headers)
        return OtelTurnTrace(
            self._tracer, self._tracer.start_span(operation, parent, SpanKind.SERVER, attributes), operation
        )

    def close(self) -> None:
        """Send what is left. Blocks for as long as the exporter's own timeout allows."""
        self._provider.shutdown()


def start_tracing() -> OtelTracing:
    """Trace to where OpenTelemetry's variables say: over OTLP by default.

    Raises:
        SettingsError: The exporter that they name is not installed, or does not take their values.
    """
    name = _exporter_name()
    found = next(iter(entry_points(group=_GROUP, name=name)), None)
    if found is None:
        raise SettingsError(
            f"tracing: there is no OpenTelemetry exporter {name!r}: install the package that has it"
        )
    try:
        exporter: SpanExporter = found.load()()
    except (ImportError, ValueError) as error:
        raise SettingsError(f"tracing: the OpenTelemetry exporter {name!r} cannot be used: {error}") from None
    _log.info("turns are traced with the OpenTelemetry exporter %s", name)
    return OtelTracing(BatchSpanProcessor(exporter))


def _exporter_name() -> str:
    """An entry point's name. Plain `otlp` is OTLP over the protocol that is asked for."""
    asked = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if asked != "otlp":
        return asked
    protocol = (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    )
    return f"otlp_proto_{protocol.partition('/')[0]}"


def _attributes(report: TurnReport) -> Iterator[tuple[str, AttributeValue | None]]:
    yield "gen_ai.conversation.id", report.conversation
    yield "gen_ai.request.model", report.model
    yield "gen_ai.response.id", report.response_id
    yield "gen_ai.usage.output_tokens", report.output_tokens
    yield "gen_ai.response.time_to_first_chunk", report.ttft_s
    yield "http.response.status_code", report.status
    yield "bidikv.request.id", report.request_id
    yield "bidikv.tenant", report.tenant
    yield "bidikv.placement", str(report.placement) if report.placement is not None else None
    yield "bidikv.queued_s", report.queued_s
    if (reuse := report.reuse) is not None:
        yield "gen_ai.usage.input_tokens", reuse.prompt_tokens
        if reuse.remote_tokens is not None and reuse.local_tokens is not None:
            yield "gen_ai.usage.cache_read.input_tokens", reuse.remote_tokens + reuse.local_tokens
        yield "bidikv.reuse.reason", str(reuse.reason)
        yield "bidikv.reuse.remote_tokens", reuse.remote_tokens
        yield "bidikv.reuse.local_tokens", reuse.local_tokens
        yield "bidikv.reuse.computed_tokens", reuse.computed_tokens
        yield "bidikv.reuse.diverged_at_token", reuse.diverged_at_token


def _fail(span: Span, outcome: str) -> None:
    if outcome not in _CLIENTS_DOING | {OK, "cancelled"}:
        span.set_attribute("error.type", outcome)
        span.set_status(Status(StatusCode.ERROR, outcome))
