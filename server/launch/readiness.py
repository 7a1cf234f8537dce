"""Whether an engine or a router is ready, asked over HTTP."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from bidikv_server.router.probes import parse_index_info

if TYPE_CHECKING:
    from collections.abc import Mapping

_TIMEOUT_S: Final = 2.0
_OK: Final = 200


def fetch(url: str) -> str | None:
    """The body of a successful GET; None when nobody answers yet or the answer is another one."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", parts.path or "/")
        response = connection.getresponse()
        body = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return body if response.status == _OK else None


def is_healthy(url: str) -> bool:
    """Whether `/health` answers 200."""
    return fetch(f"{url}/health") is not None


def router_is_ready(url: str, engines: int, indexes: int) -> bool:
    """Whether a router sees this many healthy engines, and as many decode engines' retention indexes."""
    page = fetch(f"{url}/health")
    return page is not None and sees_all(json.loads(page), engines, indexes)


def sees_all(health: Mapping[str, Any], engines: int, indexes: int) -> bool:
    """Read that out of the router's health page."""
    seen = [engine for role in ("prefill", "decode") for engine in health[role]]
    known = [engine for engine in health["decode"] if engine["index"]]
    return sum(engine["healthy"] for engine in seen) >= engines and len(known) >= indexes


def index_address(url: str) -> str | None:
    """The address of the retention index that an engine publishes, or None."""
    return find_index_address(fetch(f"{url}/metrics") or "")


def find_index_address(metrics: str) -> str | None:
    """Read the index's address out of a metrics page."""
    indexes = parse_index_info(metrics)
    return indexes[0].address if indexes else None
