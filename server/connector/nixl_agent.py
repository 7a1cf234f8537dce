"""The only importer of NIXL: an agent proxy that separates our notifications and can poll instead of spin."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from typing import Any, Final

logger = logging.getLogger("vllm.bidikv")

READBACK_PREFIX: Final = "bidikv-readback-"
"""Request ids under which prefill reads retained blocks. Decode knows no such request and must not look for one."""

_FAST_POLL_S: Final = 0.001
_SLOW_POLL_S: Final = 0.02
_FAST_FOR_S: Final = 2.0
_TELL_AGAIN_S: Final = 60.0


def quiet_agent() -> Any:
    """A NIXL agent without a progress thread of its own, for machines where that thread would take a whole core.

    `NIXL_THREAD_SYNC_STRICT` makes the agent safe for the engine's thread and our polling thread together.
    """
    from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t  # noqa: PLC0415

    config = nixl_agent_config(
        enable_prog_thread=False,
        num_threads=0,
        capture_telemetry=True,
        sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    return nixl_agent(str(uuid.uuid4()), config)


def _nixl_errors() -> tuple[type[Exception], ...]:
    """NIXL's exception classes, which have no base of their own."""
    import nixl._bindings as bindings  # noqa: PLC0415

    kinds = vars(bindings).values()
    return tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception))


class AgentProxy:
    """Passes everything through to a NIXL agent, but keeps readback notifications from the engine.

    With `poll=True` a thread calls the agent's `get_new_notifs` so that peers' reads make progress while the engine
    is idle: every millisecond for two seconds after `wake`, every 20 ms otherwise. What it collects waits for the
    engine's own next call. Runs in the worker process; `wake` may be called from any thread.
    """

    def __init__(self, agent: Any, *, poll: bool) -> None:
        """Wrap `agent`; the caller must `close` the proxy before it drops the agent."""
        self._agent = agent
        self._lock = threading.Lock()
        self._kept: dict[str, list[bytes]] = {}
        self._awake_until_s = time.monotonic() + _FAST_FOR_S
        self._told_s = -_TELL_AGAIN_S
        self._bell = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if poll:
            self._thread = threading.Thread(target=self._poll, name="bidikv-nixl-progress", daemon=True)
            self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def wake(self) -> None:
        """A transfer is about to happen: poll fast for a while."""
        self._awake_until_s = time.monotonic() + _FAST_FOR_S
        self._bell.set()

    def has_ended(self, handle: Any) -> bool:
        """Whether a transfer is over, well or not. An error state is an end: nothing is written after it."""
        try:
            return bool(self._agent.check_xfer_state(handle) != "PROC")
        except _nixl_errors() as error:
            logger.warning("bidikv: a transfer ended with an error: %s", error)
            return True

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Notifications for the engine since the last call, by agent name."""
        self._collect()
        with self._lock:
            kept, self._kept = self._kept, {}
        return kept

    def close(self) -> None:
        """Stop polling. Idempotent."""
        self._stop.set()
        self._bell.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _collect(self) -> None:
        for agent, notifs in self._agent.get_new_notifs().items():
            ours = [notif for notif in notifs if notif.startswith(READBACK_PREFIX.encode())]
            if ours:
                self.wake()
            theirs = [notif for notif in notifs if notif not in ours]
            if theirs:
                with self._lock:
                    self._kept.setdefault(agent, []).extend(theirs)

    def _poll(self) -> None:
        while not self._stop.is_set():
            try:
                self._collect()
            except Exception:
                # The thread's top: without it an idle engine would never serve a read again. NIXL raises here when a
                # peer goes away; one line a minute tells of a lasting trouble without flooding the log.
                if time.monotonic() - self._told_s > _TELL_AGAIN_S:
                    self._told_s = time.monotonic()
                    logger.exception("bidikv: NIXL could not be polled; going on")
            awake = time.monotonic() < self._awake_until_s
            if self._bell.wait(_FAST_POLL_S if awake else _SLOW_POLL_S):
                self._bell.clear()
