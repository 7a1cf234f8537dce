"""The headers between a client and the router: names, formats and parsers (standard library only).

Client to router: `X-Session-ID` carries the conversation, `x-bidikv-turn` the turn's metadata.
Router to client: `x-bidikv-reuse` says how much of the prompt was reused and why not more.
Both bidikv headers are RFC 9651 dictionaries with a version member first, so that either side may add members.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Final, TypeAlias

SESSION_HEADER: Final = "X-Session-ID"
TURN_HEADER: Final = "x-bidikv-turn"
REUSE_HEADER: Final = "x-bidikv-reuse"
KEY_HEADER: Final = "x-bidikv-session"
"""On answers: the router's own key of the conversation, by which its caller may ask about it or end it."""
READBACK_HEADER: Final = "x-bidikv-readback"
"""`off` serves this one request without readback (for comparisons); retention is off with it."""

WIRE_VERSION: Final = 1
SESSION_PATTERN: Final = re.compile(r"[A-Za-z0-9_-]{8,64}")
"""What LiteLLM, Dynamo, Bifrost and AWS gateways all let through."""

_MEMBER = re.compile(
    r"""\s*(?P<key>[a-z*][a-z0-9_.*-]*)
        (?:=(?:(?P<bool>\?[01])
             |(?P<number>-?\d{1,15}(?:\.\d{1,3})?)
             |"(?P<string>(?:[ !#-\[\]-~]|\\["\\])*)"
             |(?P<token>[A-Za-z*][A-Za-z0-9:/!#$%&'*+.^_`|~-]*)))?
        \s*(?:,|$)""",
    re.VERBOSE,
)

_USUAL = re.compile(
    r'v=1, reason="([a-z_]+)", prompt=(\d{1,15}), remote=(\d{1,15}), local=(\d{1,15}), computed=(\d{1,15})'
)

Member: TypeAlias = bool | int | float | str


def parse_dictionary(value: str) -> dict[str, Member] | None:
    """Parse the subset of RFC 9651 dictionaries that this product writes (bare items, no parameters).

    Returns None for anything else; a header that cannot be read is ignored, never an error.
    """
    members: dict[str, Member] = {}
    position = 0
    while position < len(value):
        match = _MEMBER.match(value, position)
        if match is None:
            return None
        position = match.end()
        members[match["key"]] = _item(match)
    return members


def _item(match: re.Match[str]) -> Member:
    if match["bool"] is not None:
        return match["bool"] == "?1"
    if match["number"] is not None:
        return float(match["number"]) if "." in match["number"] else int(match["number"])
    if match["string"] is not None:
        return re.sub(r"\\(.)", r"\1", match["string"])
    return match["token"] if match["token"] is not None else True


def format_dictionary(members: dict[str, Member | None]) -> str:
    """Write members as an RFC 9651 dictionary; None members are left out."""
    return ", ".join(_format_member(key, value) for key, value in members.items() if value is not None)


def _format_member(key: str, value: Member) -> str:
    if value is True:
        return key
    if value is False:
        return f"{key}=?0"
    if isinstance(value, str):
        printable = "".join(c for c in value if " " <= c <= "~")
        return '{}="{}"'.format(key, printable.replace("\\", "\\\\").replace('"', '\\"'))
    return f"{key}={value:.3f}" if isinstance(value, float) else f"{key}={value}"


@dataclass(slots=True)
class TurnHeader:
    """What a client says about one turn. Advisory: the router believes the message chain, not the index.

    Attributes:
        index: Turns of this conversation before this one.
        kind: `main`, `tool` (answers a tool call), `aux` (summaries, titles: neither retained nor disturbing)
            or `compaction`.
        parent: Wire id of the conversation this one was forked from.
        agent: Short label, for logs.
        retain_s: Seconds within which the next turn is expected; 0 asks decode to keep nothing.
        wait_s: Seconds that the next turn takes to come, because a tool runs first: decode protects the conversation,
            and retains it no shorter than without. Says nothing beside `retain_s`.
        final: No turn will follow.
    """

    index: int | None = None
    kind: str = "main"
    parent: str | None = None
    agent: str | None = None
    retain_s: float | None = None
    final: bool = False
    wait_s: float | None = None

    def format(self) -> str:
        """Write the header value."""
        index = "" if self.index is None else f"i={self.index}, "
        said = _said(self.kind, self.parent, self.agent, self.retain_s, self.wait_s, self.final or None)
        return f"v={WIRE_VERSION}, {index}{said}"

    @classmethod
    def parse(cls, value: str | None) -> TurnHeader:
        """Read the header value; members that are missing, ill-typed or of another version take defaults."""
        members = parse_dictionary(value) if value else None
        if members is None or members.get("v") != WIRE_VERSION:
            return cls()
        index, kind, parent = members.get("i"), members.get("k"), members.get("p")
        agent = members.get("a")

        def seconds(key: str) -> float | None:
            member = members.get(key)
            return (
                float(member)
                if isinstance(member, int | float) and type(member) is not bool and member >= 0
                else None
            )

        return cls(
            index=index if type(index) is int and index >= 0 else None,
            kind=kind if kind in {"main", "tool", "aux", "compaction"} else "main",
            parent=parent if isinstance(parent, str) and SESSION_PATTERN.fullmatch(parent) else None,
            agent=agent[:64] if isinstance(agent, str) else None,
            retain_s=seconds("ret"),
            wait_s=seconds("w"),
            final=members.get("final") is True,
        )


@functools.lru_cache(maxsize=256, typed=True)
def _said(*values: Member | None) -> str:
    """Members that stay the same from turn to turn, nearly always."""
    return format_dictionary(dict(zip(("k", "p", "a", "ret", "w", "final"), values, strict=True)))


@dataclass(frozen=True, slots=True)
class ReuseHeader:
    """What became of one turn's prompt. All counts are prompt tokens.

    Attributes:
        reason: A code of `bidikv_server.reasons.Reason`.
        prompt_tokens: The whole prompt, as prefill tokenised it.
        remote_tokens: Pulled from decode.
        local_tokens: Found in prefill's own prefix cache.
        computed_tokens: Computed by prefill.
        diverged_at_token: First prompt token that is not what decode holds for this conversation.
    """

    reason: str
    prompt_tokens: int | None = None
    remote_tokens: int | None = None
    local_tokens: int | None = None
    computed_tokens: int | None = None
    diverged_at_token: int | None = None

    def format(self) -> str:
        """Write the header value."""
        return format_dictionary(
            {
                "v": WIRE_VERSION,
                "reason": self.reason,
                "prompt": self.prompt_tokens,
                "remote": self.remote_tokens,
                "local": self.local_tokens,
                "computed": self.computed_tokens,
                "diverged": self.diverged_at_token,
            }
        )

    @classmethod
    def parse(cls, value: str | None) -> ReuseHeader | None:
        """Read the header value; None when it is absent or cannot be read."""
        usual = _USUAL.fullmatch(value) if value else None
        if usual is not None:  # as routers of this version write it: one look instead of one for each member
            return cls(usual[1], int(usual[2]), int(usual[3]), int(usual[4]), int(usual[5]))
        members = parse_dictionary(value) if value else None
        if members is None or not isinstance(members.get("reason"), str):
            return None

        def count(key: str) -> int | None:
            member = members.get(key)
            return member if type(member) is int else None

        return cls(
            reason=str(members["reason"]),
            prompt_tokens=count("prompt"),
            remote_tokens=count("remote"),
            local_tokens=count("local"),
            computed_tokens=count("computed"),
            diverged_at_token=count("diverged"),
        )
