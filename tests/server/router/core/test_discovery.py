"""Lists of engines: how entries are read, and what is wanted after any order of what the sources say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.router.core.discovery import (
    EngineList,
    Lookup,
    Roster,
    read_entries,
    read_entry,
    read_name_server,
)
from bidikv_server.router.core.engines import Role
from bidikv_server.router.core.ids import EngineUrl


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("http://p:1", "http://p:1"),
        (" https://[::1]:8100/ ", "https://[::1]:8100"),
        ("http://p", "http://p"),
        ("dns://decode.svc:8200", Lookup("decode.svc", 8200)),
        ("dns+http://decode:8200", Lookup("decode", 8200)),
        ("dns+https://decode.svc.:8200", Lookup("decode.svc.", 8200, "https")),
        ("dns://_http._tcp.decode.svc", Lookup("_http._tcp.decode.svc", None)),
        ("dns+https://_http._tcp.decode", Lookup("_http._tcp.decode", None, "https")),
    ],
)
def test_entries(text, entry):
    """Base URLs and names to look up."""
    assert read_entry(text) == entry
    assert read_entry(str(entry)) == entry


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not an engine's base URL or name"),
        ("localhost:1", "is not an engine's base URL or name"),
        ("http://p:1/v1", "is not an engine's base URL or name"),
        ("http://p:0", "is not an engine's base URL or name"),
        ("http://p:99999", "is not an engine's base URL or name"),
        ("dns://", "is not an engine's base URL or name"),
        ("dns+ftp://p:1", "is not an engine's base URL or name"),
        ("dns://decode", "has no port: write dns://decode:port"),
        ("dns://decode:0", "has no port from 1 to 65535"),
        ("dns://_http._tcp.decode:1", "names SRV records, which say the port themselves"),
        ("dns://decode..svc:1", "holds no DNS name"),
        ("dns://" + "a" * 64 + ":1", "holds no DNS name"),
    ],
)
def test_wrong_entries(text, message):
    """What is wrong, and what would be right."""
    with pytest.raises(ValueError, match=message):
        read_entry(text)


def test_twice():
    """However it is written, an engine stands in a list once."""
    for pair in (["http://p:1", "http://p:1/"], ["dns://p:1", "dns+http://p:1"]):
        with pytest.raises(ValueError, match="listed twice"):
            read_entries(pair)


@given(st.text(max_size=40))
def test_reading_never_breaks(text):
    """Any text is an entry that reads back as itself, or a ValueError."""
    for prefix in ("", "dns://", "http://"):
        try:
            entry = read_entry(prefix + text)
        except ValueError:
            continue
        assert read_entry(str(entry)) == entry


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("10.0.0.10", ("10.0.0.10", 53)),
        ("10.0.0.10:5353", ("10.0.0.10", 5353)),
        ("[fd00::a]:54", ("fd00::a", 54)),
        ("[fd00::a]", ("fd00::a", 53)),
    ],
)
def test_name_servers(text, server):
    """By address: a name would have to be looked up first."""
    assert read_name_server(text) == server


@pytest.mark.parametrize(
    "text", ["", "dns.local", "10.0.0", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:70000", "fd00::a"]
)
def test_wrong_name_servers(text):
    """What is none is named."""
    with pytest.raises(ValueError, match=r"is no name server|has no port"):
        read_name_server(text)


A, B, C = (EngineUrl(f"http://10.0.0.{number}:8200") for number in (1, 2, 3))
NAME = Lookup("decode", 8200)


def wanted(roster):
    return [url for url, _ in roster.wanted()]


def test_sources_add_up():
    """Settings, file and DNS together, each engine once per role, in their order."""
    roster = Roster(EngineList((C,), (A, NAME)))
    assert roster.wanted() == ((C, Role.PREFILL), (A, Role.DECODE))
    roster.file_says(EngineList((C, B), (NAME,)))
    roster.dns_says(NAME, [B, A, B], ())
    assert roster.lookups() == (NAME,)
    assert roster.wanted() == ((C, Role.PREFILL), (A, Role.DECODE), (B, Role.DECODE), (B, Role.PREFILL))
    roster.dns_says(NAME, [C], ())
    roster.file_says(EngineList())
    assert roster.wanted() == ((C, Role.PREFILL), (A, Role.DECODE), (C, Role.DECODE))


def test_a_name_that_is_no_longer_listed_is_forgotten():
    """Listed again, it stands for nothing until DNS has been asked again."""
    roster = Roster(EngineList())
    roster.file_says(EngineList((), (NAME,)))
    roster.dns_says(NAME, [A], ())
    roster.file_says(EngineList((), (B,)))
    assert roster.lookups() == ()
    roster.file_says(EngineList((), (NAME,)))
    assert wanted(roster) == []


def test_an_empty_answer_keeps_what_still_answers():
    """And nothing else; the first engine that DNS names again ends that."""
    roster = Roster(EngineList((), (NAME,)))
    roster.dns_says(NAME, [A, B], ())
    assert roster.dns_says(NAME, [], {A}) == (A,)
    assert wanted(roster) == [A]
    assert roster.dns_says(NAME, [], ()) == ()
    assert wanted(roster) == []
    roster.dns_says(NAME, [C], ())
    assert wanted(roster) == [C]
