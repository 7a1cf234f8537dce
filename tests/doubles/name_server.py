"""A DNS server on loopback, over UDP, whose records a test changes while it runs."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import dns.flags
import dns.message
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset


@dataclass
class NameServer:
    """Answers from a table.

    Attributes:
        records: Values by name and kind, as `{("decode.test.", "A"): ["127.0.0.1"]}`. A name that has none of any kind
            does not exist.
        failing: Answer SERVFAIL.
        silent: Answer nothing.
        asked: Every question, in order.
        address: Where it listens, as a setting names it.
    """

    records: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    failing: bool = False
    silent: bool = False
    asked: list[tuple[str, str]] = field(default_factory=list)
    address: str = ""

    def answer(self, data: bytes) -> bytes | None:
        """The answer to one datagram."""
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, kind = question.name.to_text(), dns.rdatatype.to_text(question.rdtype)
        self.asked.append((name, kind))
        if self.silent:
            return None
        response = dns.message.make_response(query)
        response.flags |= dns.flags.AA | dns.flags.RA
        if self.failing:
            response.set_rcode(dns.rcode.SERVFAIL)
        elif values := self.records.get((name, kind)):
            response.answer.append(dns.rrset.from_text(question.name, 5, dns.rdataclass.IN, kind, *values))
        elif name not in {known for known, _ in self.records}:
            response.set_rcode(dns.rcode.NXDOMAIN)
        return response.to_wire()


class _Protocol(asyncio.DatagramProtocol):
    def __init__(self, server: NameServer) -> None:
        self._server = server

    def connection_made(self, transport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr) -> None:
        if (answer := self._server.answer(data)) is not None:
            self._transport.sendto(answer, addr)


@contextlib.asynccontextmanager
async def name_server():
    """Run a name server on a free port."""
    server = NameServer()
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _Protocol(server), local_addr=("127.0.0.1", 0)
    )
    server.address = "127.0.0.1:{}".format(transport.get_extra_info("sockname")[1])
    try:
        yield server
    finally:
        transport.close()
