"""DNS: the router's only user of dnspython, and the place where its errors become one line."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, cast

import dns.asyncresolver
import dns.exception
import dns.resolver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dns.rdtypes.IN.A import A
    from dns.rdtypes.IN.SRV import SRV

    from bidikv_server.router.core.discovery import Lookup
    from bidikv_server.router.core.ids import EngineUrl

_LIFETIME_S: Final = 3.0
"""For one question, over all servers and tries."""


class LookupFailed(Exception):  # noqa: N818
    """DNS gave no usable answer; the message says why."""


class Resolver:
    """Asks the machine's name servers, with its search list, or one other server. Remembers no answer."""

    def __init__(self, server: tuple[str, int] | None = None) -> None:
        """Choose whom to ask; nothing is asked and no file is read yet.

        Args:
            server: Address and port of a name server; None takes those of /etc/resolv.conf.
        """
        self._server = server
        self._resolver: dns.asyncresolver.Resolver | None = None

    async def find(self, lookup: Lookup) -> tuple[EngineUrl, ...]:
        """The engines behind a name, sorted; none if DNS knows none.

        AAAA records count only where there are no A records: an engine with both is one engine.

        Raises:
            LookupFailed: Nothing is known: no answer in time, or a server's failure.
        """
        with _mapped():
            if lookup.port is None:
                records = cast("list[SRV]", await self._ask(lookup.name, "SRV"))
                found = {
                    lookup.url(record.target.to_text(omit_final_dot=True), record.port) for record in records
                }
            else:
                addresses = await self._ask(lookup.name, "A") or await self._ask(lookup.name, "AAAA")
                found = {lookup.url(record.address, lookup.port) for record in cast("list[A]", addresses)}
        return tuple(sorted(found))

    async def _ask(self, name: str, kind: str) -> list[object]:
        try:
            answer = await self._open().resolve(
                name, kind, lifetime=_LIFETIME_S, search=True, raise_on_no_answer=False
            )
        except dns.resolver.NXDOMAIN:
            return []
        return list(answer.rrset or ())

    def _open(self) -> dns.asyncresolver.Resolver:
        if self._resolver is None:
            self._resolver = dns.asyncresolver.Resolver(configure=self._server is None)
            if self._server is not None:
                self._resolver.nameservers, self._resolver.port = [self._server[0]], self._server[1]
        return self._resolver


@contextlib.contextmanager
def _mapped() -> Iterator[None]:
    try:
        yield
    except dns.exception.Timeout:
        raise LookupFailed(f"no name server answered within {_LIFETIME_S:g} s") from None
    except dns.resolver.NoNameservers:
        raise LookupFailed("the name servers failed to answer (SERVFAIL or REFUSED)") from None
    except dns.resolver.NoResolverConfiguration:
        raise LookupFailed("/etc/resolv.conf names no server (setting 'dns_server')") from None
    except (dns.exception.DNSException, OSError) as error:
        raise LookupFailed(f"{type(error).__name__}: {error}") from None
