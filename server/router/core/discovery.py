"""Which engines there should be, by what each source said last: the settings, a file, and DNS.

An entry is an engine's base URL, or a name to look up: `dns://name:port` stands for one engine at every address of the
name, `dns://_service._proto.name` for one at every target of its SRV records. `dns+https` makes them speak TLS.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from bidikv_server.router.core.engines import Role
from bidikv_server.router.core.ids import EngineUrl

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_ENGINE_URL: Final = re.compile(r"https?://(?:\[[0-9A-Fa-f:.]+\]|[^/\s:@?#\[\]]+)(?::(\d{1,5}))?")
_LOOKUP: Final = re.compile(r"dns(?:\+(http|https))?://([A-Za-z0-9._-]{1,253})(?::(\d{1,5}))?")
_NAME_SERVER: Final = re.compile(r"([0-9.]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?")
_LABEL: Final = re.compile(r"[A-Za-z0-9_-]{1,63}")
_FORMS: Final = "http://host:port, dns://name:port or dns://_service._proto.name"


@dataclass(frozen=True, slots=True)
class Lookup:
    """A name that stands for engines.

    Attributes:
        name: What to ask DNS for.
        port: Port of the engines; None takes host and port from SRV records.
        scheme: How engines are spoken to, `http` or `https`.
    """

    name: str
    port: int | None
    scheme: str = "http"

    def __str__(self) -> str:
        """As an entry of a list of engines."""
        port = "" if self.port is None else f":{self.port}"
        return f"dns{'+https' if self.scheme == 'https' else ''}://{self.name}{port}"

    def url(self, host: str, port: int) -> EngineUrl:
        """The engine at an address or target."""
        return EngineUrl(f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{port}")


Entry = EngineUrl | Lookup
Listed = tuple[EngineUrl, Role]


def read_entry(text: str) -> Entry:
    """Read one entry of a list of engines.

    Raises:
        ValueError: It is neither a base URL nor a name to look up.
    """
    text = text.strip().rstrip("/")
    if _lookup := _LOOKUP.fullmatch(text):
        scheme, name, port = _lookup.groups()
        return _checked_lookup(text, Lookup(name, int(port) if port else None, scheme or "http"))
    url = _ENGINE_URL.fullmatch(text)
    if url is None or not _is_port(url[1]):
        raise ValueError(f"{text!r} is not an engine's base URL or name ({_FORMS})")
    return EngineUrl(text)


def _checked_lookup(text: str, lookup: Lookup) -> Lookup:
    if not all(_LABEL.fullmatch(label) for label in lookup.name.removesuffix(".").split(".")):
        raise ValueError(f"{text!r} holds no DNS name ({_FORMS})")
    is_service = lookup.name.startswith("_")
    if is_service and lookup.port is not None:
        raise ValueError(f"{text!r} names SRV records, which say the port themselves: leave it out")
    if not is_service and lookup.port is None:
        raise ValueError(f"{text!r} has no port: write dns://{lookup.name}:port")
    if lookup.port is not None and not _is_port(str(lookup.port)):
        raise ValueError(f"{text!r} has no port from 1 to 65535")
    return lookup


def _is_port(digits: str | None) -> bool:
    return digits is None or 1 <= int(digits) <= 65535


def read_entries(texts: Iterable[str]) -> tuple[Entry, ...]:
    """Read a list of engines.

    Raises:
        ValueError: An entry is wrong, or stands there twice.
    """
    entries = tuple(read_entry(text) for text in texts)
    if len(set(entries)) != len(entries):
        raise ValueError("an engine is listed twice")
    return entries


def read_name_server(text: str) -> tuple[str, int]:
    """Read the address of a name server, with or without a port.

    Raises:
        ValueError: It is none.
    """
    parts = _NAME_SERVER.fullmatch(text)
    try:
        address, port = str(ip_address(parts[1].strip("[]") if parts else "")), parts[2] if parts else None
    except ValueError:
        raise ValueError(f"{text!r} is no name server (10.0.0.10, 10.0.0.10:53 or [fd00::10]:53)") from None
    if not _is_port(port):
        raise ValueError(f"{text!r} has no port from 1 to 65535")
    return address, int(port or 53)


@dataclass(frozen=True, slots=True)
class EngineList:
    """What one source says.

    Attributes:
        prefill: Entries of prefill engines.
        decode: Entries of decode engines.
    """

    prefill: tuple[Entry, ...] = ()
    decode: tuple[Entry, ...] = ()

    def entries(self) -> tuple[tuple[Entry, Role], ...]:
        """All of them with their role."""
        return tuple((e, Role.PREFILL) for e in self.prefill) + tuple((e, Role.DECODE) for e in self.decode)


class Roster:
    """The engines that should be there. Sources report what they say; whoever applies it asks what is wanted."""

    def __init__(self, fixed: EngineList) -> None:
        self._lists = (fixed, EngineList())
        self._answers: dict[Lookup, tuple[EngineUrl, ...]] = {}

    def file_says(self, listed: EngineList) -> None:
        """Replace what the file said before."""
        self._lists = (self._lists[0], listed)
        lookups = self.lookups()
        self._answers = {lookup: urls for lookup, urls in self._answers.items() if lookup in lookups}

    def dns_says(
        self, lookup: Lookup, found: Iterable[EngineUrl], answering: Collection[EngineUrl]
    ) -> tuple[EngineUrl, ...]:
        """Replace what DNS said before about a name; returns the engines that stay although DNS names none.

        No engines at all is what DNS also says when it is the one at fault. Those that still answer are believed
        then, and only those: an address may soon belong to somebody else.

        Args:
            lookup: The name.
            found: Engines by its records.
            answering: Engines that pass their probes.
        """
        named = tuple(dict.fromkeys(found))
        kept = () if named else tuple(url for url in self._answers.get(lookup, ()) if url in answering)
        self._answers[lookup] = named or kept
        return kept

    def lookups(self) -> tuple[Lookup, ...]:
        """The names to ask DNS for, each once."""
        return tuple(dict.fromkeys(entry for entry, _ in self._entries() if isinstance(entry, Lookup)))

    def wanted(self) -> tuple[Listed, ...]:
        """The engines, each once per role, in the order of the sources and of their lists."""
        return tuple(
            dict.fromkeys((url, role) for entry, role in self._entries() for url in self._urls(entry))
        )

    def _entries(self) -> tuple[tuple[Entry, Role], ...]:
        return tuple(entry for listed in self._lists for entry in listed.entries())

    def _urls(self, entry: Entry) -> tuple[EngineUrl, ...]:
        return self._answers.get(entry, ()) if isinstance(entry, Lookup) else (entry,)
