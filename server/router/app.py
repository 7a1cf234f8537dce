"""The router as an ASGI application: wiring, dispatch and lifespan."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from bidikv_server.router import tls
from bidikv_server.router.access import Access
from bidikv_server.router.admin import PREFIX, AdminRoutes
from bidikv_server.router.busy_poll import BusyPoll
from bidikv_server.router.core.circuit import CircuitRule
from bidikv_server.router.core.conversations import ConversationTable
from bidikv_server.router.core.engines import EngineTable
from bidikv_server.router.core.history import History
from bidikv_server.router.core.paths import TURN_PATHS
from bidikv_server.router.core.placer import Placer
from bidikv_server.router.core.recent import RecentTurns
from bidikv_server.router.dialects import dialect_of
from bidikv_server.router.discovery import Discovery
from bidikv_server.router.errors import (
    BadRequest,
    ClientGone,
    MethodNotAllowed,
    NotFound,
    RouterFault,
    ShuttingDown,
)
from bidikv_server.router.metrics import RouterMetrics
from bidikv_server.router.own import PREFIX as OWN_PREFIX
from bidikv_server.router.own import OwnRoutes
from bidikv_server.router.page import PATH as PAGE_PATH
from bidikv_server.router.page import LivePage
from bidikv_server.router.passthrough import PASSED_ON, PassThrough
from bidikv_server.router.policies import load_policies
from bidikv_server.router.probes import Prober
from bidikv_server.router.queue import Phase, TurnQueue
from bidikv_server.router.releases import Releaser
from bidikv_server.router.replies import Endpoint, Receive, Reply, Scope, Send, headers_of
from bidikv_server.router.responses import ResponseRoutes
from bidikv_server.router.routes import Routes, read_body
from bidikv_server.router.state.create import create_store
from bidikv_server.router.state.store import Clock
from bidikv_server.router.status import RouterStatus
from bidikv_server.router.tracing import open_tracing
from bidikv_server.router.transfer import registry
from bidikv_server.router.turns import TurnService
from bidikv_server.router.upstream import EngineClient
from bidikv_server.router.watch import Observer

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from bidikv_server.router.settings import RouterSettings
    from bidikv_server.router.tracing import Tracing

_log = logging.getLogger(__name__)

_OPEN_PATHS: Final = frozenset({"/live", "/health", "/ready", "/metrics", "/openapi.json"})
"""Answered without a key."""
_RECENT_TURNS: Final = 500
_WATCH_AFTER_S: Final = 0.01
"""A client that goes before is noticed then."""


class RouterApp:
    """ASGI entry point.

    Attributes:
        engines: Health and load of the engines.
        table: Known conversations.
        history: What became of their last turns.
        recent: The last turns of all.
        metrics: Prometheus metrics.
        placer: What was learnt about engines and prompts.
        touch: To be told of every packet that comes; None where nobody has to be.
        upstream_identity: The certificate that engines are shown, if there is one.
    """

    def __init__(self, settings: RouterSettings, tracing: Tracing | None = None) -> None:
        """Wire everything up; nothing is opened yet.

        Args:
            settings: What the router was told.
            tracing: Makes spans; None makes those that the settings ask for.

        Raises:
            SettingsError: The settings ask for what cannot be had.
        """
        self._settings = settings
        self.engines = EngineTable(
            (),
            probe_failures=settings.probe_failures,
            linger_s=settings.max_ttl_s,
            circuit=CircuitRule(settings.circuit_failures, settings.circuit_open_s),
        )
        self.placer = Placer(
            self.engines,
            load_policies(settings),
            max_prefixes=settings.max_prefixes,
            prefill_required=not settings.prefill_fallback,
        )
        self.table = ConversationTable(
            max_conversations=settings.max_conversations,
            max_turns=settings.max_turns,
            idle_s=settings.conversation_idle_s,
        )
        self.history = History(
            max_conversations=settings.max_conversations,
            max_records=settings.max_records,
            idle_s=settings.conversation_idle_s,
        )
        self._clock = clock = Clock()
        self.recent = RecentTurns(max_turns=_RECENT_TURNS)
        self.metrics = RouterMetrics()
        self._state = create_store(settings, self.table, self.history, clock, self.metrics.registry)
        self.metrics.conversations.set_function(self._count_conversations)
        self._tracing = tracing or open_tracing(settings.tracing)
        self._observer = Observer(self._tracing, self.recent, self.metrics)
        self._access = Access(settings)
        self._queue = TurnQueue(
            self.metrics,
            max_in_flight=settings.max_in_flight,
            max_queue=settings.max_queue,
            max_in_flight_per_tenant=settings.max_in_flight_per_tenant,
        )
        self.metrics.in_flight.set_function(lambda: self._queue.running)
        context, self.upstream_identity = tls.upstream(settings)
        poll = BusyPoll(settings.busy_poll_s, self.metrics.busy_poll_seconds.inc)
        self.touch = poll.touch if settings.busy_poll_s else None
        self._client = EngineClient(
            connect_timeout_s=settings.connect_timeout_s, tls=context, touch=self.touch
        )
        transfer = registry.build(settings, self._client)
        self._prober = Prober(
            self._client,
            self.engines,
            transfer=transfer,
            interval_s=settings.probe_interval_s,
            timeout_s=settings.probe_timeout_s,
            came_up=self.placer.came_up,
        )
        self._discovery = Discovery(settings, self.engines, self._prober)
        turns = TurnService(
            settings,
            self.engines,
            self._state,
            self._client,
            self.metrics,
            access=self._access,
            placer=self.placer,
            transfer=transfer,
        )
        self._responses = ResponseRoutes(
            settings, engines=self.engines, client=self._client, access=self._access, state=self._state
        )
        routes = Routes(
            settings,
            engines=self.engines,
            metrics=self.metrics,
            turns=turns,
            access=self._access,
            queue=self._queue,
            responses=self._responses,
        )
        passed = PassThrough(settings, engines=self.engines, client=self._client, access=self._access)
        self._releaser = Releaser(settings.secret.get_secret_value() if settings.secret is not None else "")
        self._admin = AdminRoutes(
            settings,
            engines=self.engines,
            state=self._state,
            clock=clock,
            access=self._access,
            releaser=self._releaser,
            status=RouterStatus(
                self._queue, self.metrics, self.recent, self._prober.notes, self._count_conversations
            ),
        )
        self._own = OwnRoutes(
            self._admin, access=self._access, releaser=self._releaser, max_ttl_s=settings.max_ttl_s
        )
        self._page = LivePage(enabled=settings.admin_key is not None)
        self._endpoints: dict[str, dict[str, Endpoint]] = {
            **{path: {"POST": routes.turn} for path in TURN_PATHS},
            **{path: {"POST": passed.post} for path in PASSED_ON},
            "/v1/models": {"GET": passed.models},
            "/live": {"GET": routes.live},
            "/health": {"GET": routes.health},
            "/ready": {"GET": routes.ready},
            "/metrics": {"GET": routes.metrics},
            "/openapi.json": {"GET": routes.description},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the application's life."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._request(scope, receive, Reply(send, dialect_of(scope["path"])))

    def stop(self) -> None:
        """Take no new turns, and send away those that wait; running ones go on. For the loop that serves."""
        self._queue.close()

    async def _request(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        try:
            if scope["path"] not in TURN_PATHS:
                await self._serve(scope, receive, reply)
                return
            with self._observer.turn(scope, reply):
                await self._serve(scope, receive, reply)
        except ClientGone:
            _log.debug("a client left before its answer was complete")
        except asyncio.CancelledError:
            # The server's way to end what outlives the grace period: the client hears of it instead of a cut line.
            if self._queue.phase is not Phase.STOPPING:
                raise
            await reply.cut_off(ShuttingDown())
        except RouterFault as fault:
            await reply.fault(fault)
        except RecursionError:
            await reply.fault(BadRequest("The request body is nested too deeply."))
        except Exception:
            _log.exception("request failed")
            if reply.started:
                raise
            await reply.fault(RouterFault("The router failed on this request."))

    def _count_conversations(self) -> int:
        self.table.expire(self._clock())
        return len(self.table)

    async def _serve(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        endpoint = self._endpoint(scope)
        if not scope["path"].startswith((PREFIX, PAGE_PATH)) and scope["path"] not in _OPEN_PATHS:
            # Before the body: whoever has no key, or no place, costs no memory.
            headers = headers_of(scope)
            self._access.tenant(headers)
            if scope["path"] in TURN_PATHS:
                self._queue.check(self._access.share(headers))
        # Nothing is done with the body of a GET, and most of them need no key: it is dropped as it comes.
        raw = (
            b""
            if scope["method"] == "GET"
            else await read_body(scope, receive, self._settings.max_body_bytes)
        )
        await _while_connected(endpoint(scope, raw, reply), receive)

    def _endpoint(self, scope: Scope) -> Endpoint:
        if scope["path"].startswith(PREFIX):
            return self._admin.endpoint(scope)
        if scope["path"].startswith(OWN_PREFIX):
            return self._own.endpoint(scope)
        if self._page.serves(scope["path"]):
            return self._page.endpoint(scope)
        methods = self._endpoints.get(scope["path"]) or self._responses.endpoints(scope["path"])
        if methods is None:
            raise NotFound(f"There is no endpoint {scope['path']}.")
        endpoint = methods.get(scope["method"])
        if endpoint is None:
            raise MethodNotAllowed(f"{scope['path']} does not take {scope['method']}.")
        return endpoint

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """Find and probe engines once before the first request; close everything after the last.

        The router starts without any engine, too, and is ready when they come.
        """
        await receive()
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._client)
            stack.push_async_callback(self._releaser.close)
            stack.callback(self._observer.tell)
            stack.push_async_callback(asyncio.to_thread, self._tracing.close)
            await self._state.open()
            stack.push_async_callback(self._state.close)
            await self._discovery.look()
            await self._prober.probe_all()
            for background in (self._prober.run(), self._discovery.run()):
                stack.push_async_callback(_stop, asyncio.create_task(background))
            self._queue.open()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            self.stop()
        await send({"type": "lifespan.shutdown.complete"})


async def _while_connected(work: Awaitable[None], receive: Receive) -> None:
    """Run until done, or until the client goes: then everything the work has open is closed.

    Raises:
        ClientGone: The client went first.
    """
    working, left = asyncio.current_task(), False
    assert working is not None  # noqa: S101  # a coroutine runs in a task
    watching: asyncio.Task[None] | None = None

    async def watch() -> None:
        nonlocal left
        await _disconnected(receive)
        left = True
        working.cancel()

    def begin() -> None:
        nonlocal watching
        watching = asyncio.create_task(watch())

    # Not at once: whoever waits for an answer's beginning waits for this, too, and few go before it.
    beginning = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, begin)
    try:
        await work
    except asyncio.CancelledError:
        # Whoever else cancelled as well is still to be obeyed.
        if left and not working.uncancel():
            raise ClientGone from None
        raise
    finally:
        beginning.cancel()
        if watching is not None:
            watching.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(task: asyncio.Future[None]) -> None:
    """Cancel a task and wait until it has cleaned up; what it raised is somebody else's to read."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def create_app(settings: RouterSettings, tracing: Tracing | None = None) -> RouterApp:
    """Build the application; `tracing` as in `RouterApp`."""
    return RouterApp(settings, tracing)
