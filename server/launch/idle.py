"""Wait until an engine has nothing to do, so that it can be stopped without cutting an answer."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Final

from bidikv_server.launch.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable

_WORK: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_ASK_TIMEOUT_S: Final = 5.0
_LOOK_EVERY_S: Final = 1.0


class StillBusyError(LaunchError):
    """Requests still ran when the time was up."""


def requests_in(exposition: str) -> int:
    """Requests that run or wait, by vLLM's metrics, over all of its data-parallel ranks."""
    found = 0.0
    for line in exposition.splitlines():
        name, _, rest = line.partition("{")
        if name in _WORK:
            found += float(rest.rpartition("}")[2].split()[0])
    return int(found)


def wait_idle(
    url: str,
    *,
    settle_s: float,
    timeout_s: float,
    ask: Callable[[str], str | None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when the engine has had `settle_s` to be left alone, and no request runs or waits; or when it is gone.

    Args:
        url: The engine's base URL.
        settle_s: Stay at least this long: routers learn only then that the engine is leaving.
        timeout_s: Wait no longer than this.
        ask: Reads the metrics of an engine; None if nothing listens there, an OSError if it is silent.
        clock: Monotonic seconds.
        sleep: Waits.

    Raises:
        StillBusyError: Requests still ran then.
    """
    ask = ask or _metrics
    started_s = clock()
    while True:
        try:
            exposition = ask(url)
        except OSError:
            # Too busy to say so is busy.
            left = "an unknown number of"
        else:
            if exposition is None:
                return
            left = str(requests_in(exposition))
        waited_s = clock() - started_s
        if waited_s >= settle_s and left == "0":
            return
        if waited_s >= timeout_s:
            raise StillBusyError(f"{left} requests still run on {url} after {timeout_s:g} s")
        sleep(_LOOK_EVERY_S)


def _metrics(url: str) -> str | None:
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/metrics", timeout=_ASK_TIMEOUT_S) as answer:  # noqa: S310
            body: bytes = answer.read()
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):
            return None
        raise
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    return body.decode("utf-8", "replace")
