"""The router's Prometheus metrics: names, units and buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

from bidikv._version import __version__
from bidikv_server.router.core.circuit import CircuitState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bidikv.headers import ReuseHeader
    from bidikv_server.router.core.engines import EngineSnapshot
    from bidikv_server.router.core.policy import RoutePlan

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
_CIRCUITS: Final = (CircuitState.CLOSED, CircuitState.HALF_OPEN, CircuitState.OPEN)
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TTFT_SECONDS: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0),
)


Metric = TypeVar("Metric", Counter, Histogram)


class Labelled(Generic[Metric]):
    """A metric's children, each looked up in the library once: a turn counts a dozen times."""

    def __init__(self, metric: Metric) -> None:
        self.metric: Metric = metric
        self._children: dict[tuple[str, ...], Metric] = {}

    def labels(self, *values: str) -> Metric:
        """The child with these values of the labels."""
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self.metric.labels(*values)
        return child


class RouterMetrics:
    """All metrics of one router, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.turns = Labelled(
            Counter(
                "bidikv_router_turns",
                "Turns answered, by the reason of their reuse.",
                ["reason"],
                registry=self.registry,
            )
        )
        self.placements = Labelled(
            Counter(
                "bidikv_router_placements",
                "Turns answered, by why they were decoded where they were.",
                ["reason"],
                registry=self.registry,
            )
        )
        self.prefill_choices = Labelled(
            Counter(
                "bidikv_router_prefill_choices",
                "Turns answered, by why their prompts were computed where they were.",
                ["reason"],
                registry=self.registry,
            )
        )
        self.modes = Labelled(
            Counter(
                "bidikv_router_modes",
                "Turns answered, by how they got their prompts' KV, and why in that way.",
                ["mode", "reason"],
                registry=self.registry,
            )
        )
        self.circuits_opened = Counter(
            "bidikv_router_circuits_opened",
            "How often legs failed until an engine was left alone for a while.",
            ["role", "engine"],
            registry=self.registry,
        )
        self.engine_circuit = Gauge(
            "bidikv_router_engine_circuit",
            "Whether an engine's last legs ended well: 0 closed (they did), 1 half open, 2 open.",
            ["role", "engine"],
            registry=self.registry,
        )
        self.engine_load = Gauge(
            "bidikv_router_engine_load",
            "Requests that an engine has or is about to get, by whose they are: this router's, expected, or others'.",
            ["role", "engine", "of"],
            registry=self.registry,
        )
        self.failed_turns = Labelled(
            Counter(
                "bidikv_router_failed_turns",
                "Turns without a clean end, by cause.",
                ["cause"],
                registry=self.registry,
            )
        )
        self.tokens = Labelled(
            Counter(
                "bidikv_router_prompt_tokens",
                "Prompt tokens by where their KV came from: remote (decode), local (prefill's cache) or computed.",
                ["source"],
                registry=self.registry,
            )
        )
        self.identities = Labelled(
            Counter(
                "bidikv_router_identities",
                "Turns by the convention that named their conversation; none goes by the messages.",
                ["source"],
                registry=self.registry,
            )
        )
        self.tokenisations = Labelled(
            Counter(
                "bidikv_router_prompt_tokenisations",
                "Decode legs with a handle, by where the prompt's tokens came from: once is from prefill.",
                ["outcome"],
                registry=self.registry,
            )
        )
        self.retries = Labelled(
            Counter(
                "bidikv_router_retries",
                "Legs tried again elsewhere, by leg.",
                ["leg"],
                registry=self.registry,
            )
        )
        self.leg_seconds = Labelled(
            Histogram(
                "bidikv_router_leg_seconds",
                "Duration of a leg, by leg and outcome.",
                ["leg", "outcome"],
                buckets=_SECONDS,
                registry=self.registry,
            )
        )
        self.ttft_seconds = Labelled(
            Histogram(
                "bidikv_router_ttft_seconds",
                "From the whole request to the first byte of the answer's body, by the reason of the turn's reuse.",
                ["reason"],
                buckets=_TTFT_SECONDS,
                registry=self.registry,
            )
        )
        self.queue_seconds = Histogram(
            "bidikv_router_queue_seconds",
            "How long turns waited for others to end before they ran or went away.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.engine_up = Gauge(
            "bidikv_router_engine_up",
            "Whether an engine answers.",
            ["role", "engine"],
            registry=self.registry,
        )
        self.engine_draining = Gauge(
            "bidikv_router_engine_draining",
            "Whether an engine is being emptied.",
            ["role", "engine"],
            registry=self.registry,
        )
        self.conversations = Gauge(
            "bidikv_router_conversations", "Conversations remembered.", registry=self.registry
        )
        self.queued = Gauge(
            "bidikv_router_turns_queued", "Turns waiting for one to end.", registry=self.registry
        )
        self.refused = Counter(
            "bidikv_router_refused_turns",
            "Turns refused before they began, by cause.",
            ["cause"],
            registry=self.registry,
        )
        self.refused_connections = Counter(
            "bidikv_router_refused_connections",
            "Connections hung up on before the application saw a request, by cause.",
            ["cause"],
            registry=self.registry,
        )
        self.busy_poll_seconds = Counter(
            "bidikv_router_busy_poll_seconds",
            "Processor time spent on looking for packets that had not come (busy_poll_s).",
            registry=self.registry,
        )
        self.in_flight = Gauge("bidikv_router_turns_in_flight", "Turns running now.", registry=self.registry)
        self.info = Info("bidikv_router", "The router's version.", registry=self.registry)
        self.info.info({"version": __version__})

    def turn_answered(self, reuse: ReuseHeader) -> None:
        """Count a turn that ended cleanly."""
        self.turns.labels(reuse.reason).inc()
        for source, count in (
            ("remote", reuse.remote_tokens),
            ("local", reuse.local_tokens),
            ("computed", reuse.computed_tokens),
        ):
            if count is not None:
                self.tokens.labels(source).inc(count)

    def totals(self) -> dict[str, dict[str, int]]:
        """Counts since the start: turns by reason, failed turns by cause, prompt tokens by source."""
        counters = {"turns": self.turns, "failed_turns": self.failed_turns, "prompt_tokens": self.tokens}
        return {
            name: {
                next(iter(sample.labels.values())): round(sample.value)
                for metric in counter.metric.collect()
                for sample in metric.samples
                if sample.name.endswith("_total")
            }
            for name, counter in counters.items()
        }

    def turn_placed(self, plan: RoutePlan) -> None:
        """Count the choices of a turn that ended cleanly."""
        self.placements.labels(plan.placement).inc()
        self.prefill_choices.labels(plan.prefill_choice).inc()
        self.modes.labels(plan.mode, plan.mode_reason).inc()

    def show_engines(self, engines: Iterable[EngineSnapshot]) -> None:
        """Set the engines' gauges to what is known now; those of forgotten engines end."""
        self.engine_up.clear()
        self.engine_draining.clear()
        self.engine_circuit.clear()
        self.engine_load.clear()
        for engine in engines:
            self.engine_up.labels(engine.role, engine.url).set(engine.healthy)
            self.engine_draining.labels(engine.role, engine.url).set(engine.draining)
            self.engine_circuit.labels(engine.role, engine.url).set(_CIRCUITS.index(engine.circuit))
            for of, count in (
                ("router", engine.in_flight),
                ("expected", engine.expected),
                ("others", engine.others),
            ):
                self.engine_load.labels(engine.role, engine.url, of).set(count)

    def render(self) -> bytes:
        """Text exposition."""
        return generate_latest(self.registry)
