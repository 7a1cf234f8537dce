"""The store that the settings ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bidikv_server.router.core.kept import KeptResponses
from bidikv_server.router.settings import SettingsError
from bidikv_server.router.state.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

    from bidikv_server.router.core.conversations import ConversationTable
    from bidikv_server.router.core.history import History
    from bidikv_server.router.settings import RouterSettings
    from bidikv_server.router.state.store import StateStore


def create_store(
    settings: RouterSettings,
    table: ConversationTable,
    history: History,
    clock: Callable[[], float],
    registry: CollectorRegistry,
) -> StateStore:
    """The router's own memory or, given `state_url`, that memory in front of the server.

    Raises:
        SettingsError: The package for it is missing, or the URL has an option that is none.
    """
    kept = KeptResponses(max_responses=settings.max_responses, ttl_s=settings.response_ttl_s)
    memory = MemoryStore(table, history, kept, clock)
    if settings.state_url is None:
        return memory
    try:
        # Most routers share nothing and need no client.
        from bidikv_server.router.state.connection import StateServer  # noqa: PLC0415
    except ImportError:
        raise SettingsError("state_url: needs the package redis (pip install 'bidikv[router]')") from None
    from bidikv_server.router.state.metrics import StateMetrics  # noqa: PLC0415
    from bidikv_server.router.state.outage import Circuit  # noqa: PLC0415
    from bidikv_server.router.state.shared import Bounds, SharedStore  # noqa: PLC0415

    password = settings.state_password.get_secret_value() if settings.state_password is not None else None
    try:
        server = StateServer(
            settings.state_url.value,
            password=password,
            prefix=settings.state_prefix,
            timeout_s=settings.state_timeout_s,
        )
    except (TypeError, ValueError) as error:
        raise SettingsError(f"state_url: {error}") from None
    metrics = StateMetrics(registry)
    return SharedStore(memory, Circuit(server, metrics), metrics, bounds=Bounds(settings), clock=clock)
