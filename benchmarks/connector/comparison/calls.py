"""The client side of a measurement: JSON over HTTP, streamed events with their times, metrics pages."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_PATIENCE_S = 300.0
_DATA = b"data:"
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class CallFailedError(Exception):
    """An engine or a router gave no answer to measure."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    body: dict[str, Any]
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream, with the moment it came on the monotonic clock."""

    at_s: float
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Page:
    """A metrics page, read once."""

    samples: tuple[tuple[str, Mapping[str, str], float], ...]

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples with this name and these labels; 0 without any."""
        return sum(
            value for found, has, value in self.samples if found == name and labels.items() <= has.items()
        )

    def label(self, name: str, label: str) -> str:
        """A label's value on the first sample with this name.

        Raises:
            CallFailedError: There is none.
        """
        for found, has, _ in self.samples:
            if found == name and label in has:
                return has[label]
        raise CallFailedError(f"the engine's metrics have no {name} with a label {label}")


def post(
    url: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    *,
    timeout_s: float = _PATIENCE_S,
) -> Reply:
    """Send JSON and read the whole answer.

    Raises:
        CallFailedError: The status is not 200.
        TimeoutError: Nothing came for `timeout_s`.
    """
    connection, response = _send(url, body, headers, timeout_s)
    try:
        text = response.read()
        return Reply(json.loads(text) if text else {}, {k.lower(): v for k, v in response.getheaders()})
    finally:
        connection.close()


def events(
    url: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    *,
    timeout_s: float = _PATIENCE_S,
) -> Iterator[Event | Reply]:
    """Send JSON and pass on the headers (as a `Reply` without a body), then each event as it comes.

    Raises:
        CallFailedError: The status is not 200, or the stream ends without its end marker.
        TimeoutError: Nothing came for `timeout_s`.
    """
    connection, response = _send(url, body, headers, timeout_s)
    try:
        yield Reply({}, {k.lower(): v for k, v in response.getheaders()})
        for line in response:
            if not line.startswith(_DATA):
                continue
            data = line[len(_DATA) :].strip()
            if data == b"[DONE]":
                return
            yield Event(time.monotonic(), json.loads(data))
        raise CallFailedError(f"the stream of {url} ended without its end marker")
    finally:
        connection.close()


def page(engine_url: str) -> Page:
    """An engine's metrics now.

    Raises:
        CallFailedError: There are none.
    """
    parts = urlsplit(engine_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    if response.status != 200:
        raise CallFailedError(f"{engine_url}/metrics answers {response.status}")
    return Page(
        tuple(
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        )
    )


def _send(
    url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None, timeout_s: float
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    headers = {"Content-Type": "application/json", **(headers or {})}
    try:
        connection.request("POST", parts.path, json.dumps(body), headers)
        response = connection.getresponse()
        refusal = response.read() if response.status != 200 else None
    except BaseException:
        connection.close()
        raise
    if refusal is not None:
        connection.close()
        raise CallFailedError(f"{url} answers {response.status}: {refusal[:300].decode(errors='replace')}")
    return connection, response


def fan_out(work: Callable[[_Item], _Result], items: Sequence[_Item], at_once: int) -> list[_Result]:
    """Results in order. When one fails, or on Ctrl-C, nothing new is begun and nothing under way is waited for."""
    pool = ThreadPoolExecutor(at_once)
    failures: list[BaseException] = []

    def unless_failed(item: _Item) -> _Result:
        # The pool can have begun everything else by the time that whoever waits for it hears of a failure.
        if failures:
            raise failures[0]
        try:
            return work(item)
        except BaseException as error:
            failures.append(error)
            raise

    try:
        return list(pool.map(unless_failed, items))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
