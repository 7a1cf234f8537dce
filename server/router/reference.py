"""Every setting in a table: for `bidikv router --settings`, and for docs/settings.md, which is made of it."""

from __future__ import annotations

import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from bidikv_server.router.settings import ENV_PREFIX, RouterSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

_SECRET_TYPES: Final = ("KeyDigest", "KeyRing", "SecretStr")
_SECTIONS: Final = {
    "Listening": ("host", "port", "tls_cert_file", "tls_key_file", "tls_client_ca_file", "shutdown_grace_s"),
    "Engines": (
        "prefill",
        "decode",
        "engines_file",
        "dns_interval_s",
        "dns_server",
        "probe_interval_s",
        "probe_timeout_s",
        "probe_failures",
    ),
    "Transfer": ("transfer", "mooncake_bootstrap", "handle_ttl_s"),
    "Engines with TLS": ("upstream_ca_file", "upstream_cert_file", "upstream_key_file", "upstream_verify"),
    "Reuse": (
        "readback",
        "prefill_fallback",
        "tokenise_once",
        "normalise_history",
        "default_ttl_s",
        "max_ttl_s",
    ),
    "Keys": ("api_keys", "api_keys_file", "api_key", "upstream_api_key", "admin_key", "secret"),
    "Timeouts": (
        "connect_timeout_s",
        "prefill_timeout_s",
        "first_byte_timeout_s",
        "decode_timeout_s",
        "idle_timeout_s",
        "request_timeout_s",
        "stalled_timeout_s",
    ),
    "Placement": (
        "decode_policy",
        "pressure_ratio",
        "pressure_margin",
        "prefill_policy",
        "max_prefixes",
        "mode_policy",
        "alone_tokens",
    ),
    "Failures": (
        "max_attempts",
        "retry_budget_s",
        "refused_wait_s",
        "circuit_failures",
        "circuit_open_s",
    ),
    "Load": (
        "busy_poll_s",
        "max_in_flight",
        "max_in_flight_per_tenant",
        "max_queue",
        "max_body_bytes",
        "max_head_bytes",
        "max_connections",
    ),
    "Shared state": ("state_url", "state_password", "state_prefix", "state_timeout_s"),
    "Logs and traces": ("log_level", "log_format", "tracing"),
    "Memory": (
        "max_conversations",
        "max_turns",
        "max_records",
        "conversation_idle_s",
        "max_responses",
        "response_ttl_s",
    ),
}
"""Settings that stand in no section are listed under "Other"."""
_UNITS: Final = {"_s": "seconds", "_bytes": "bytes", "_tokens": "tokens"}
_KINDS: Final = {bool: "true or false", Path: "file", str: "text", int: "number", float: "number"}

_INTRODUCTION: Final = """\
# The router's settings

<!-- Written by scripts/write_settings.py from the settings themselves: change them there. -->

`bidikv router --settings` prints this list, and `bidikv router --check` the settings in effect, secrets hidden, after checking
all of them and every file that they name.

Each one is a key of the file that `--config` names (TOML), a variable (that of `max_queue` is `BIDIKV_ROUTER_MAX_QUEUE`), and some are
options. Options win over variables, which win over the file. A wrong or unknown one is named, and the router does not start.
Secrets are never options: a process list shows those.
"""


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting.

    Attributes:
        name: As in the file.
        default: As text; `none` if there is none.
        unit: What its value counts, or what kind of value it is.
        meaning: What it does.
    """

    name: str
    default: str
    unit: str
    meaning: str

    @property
    def variable(self) -> str:
        """The variable that holds it."""
        return ENV_PREFIX + self.name.upper()


def sections() -> Iterator[tuple[str, tuple[SettingRow, ...]]]:
    """Every setting once, by section."""
    fields = RouterSettings.model_fields
    left = [name for name in fields if not any(name in names for names in _SECTIONS.values())]
    for title, names in {**_SECTIONS, "Other": tuple(left)}.items():
        rows = tuple(_row(name, fields[name]) for name in names)
        if rows:
            yield title, rows


def as_markdown() -> str:
    """The page docs/settings.md."""
    parts = [_INTRODUCTION]
    for title, rows in sections():
        lines = ["| setting | default | unit | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{row.name}` | {row.default} | {row.unit} | {row.meaning.replace('|', '&#124;')} |"
            for row in rows
        ]
        parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def as_text() -> str:
    """For a terminal, and readable as a file: every line is a comment or a section's name in one."""
    lines = []
    for title, rows in sections():
        lines.append(f"# {title}")
        for row in rows:
            lines += [
                f"#   {row.name} = {row.default}  ({row.unit}; {row.variable})",
                f"#       {row.meaning}",
            ]
        lines.append("")
    return "\n".join(lines)


def _row(name: str, field: FieldInfo) -> SettingRow:
    meaning = " ".join((field.description or "").split())
    unit = _unit(name, field)
    return SettingRow(name, _default(field), unit, meaning.replace(f", in {unit}", ""))


def _is_secret(field: FieldInfo) -> bool:
    return any(kind in repr(field.annotation) for kind in _SECRET_TYPES)


def _default(field: FieldInfo) -> str:
    value: Any = field.get_default(call_default_factory=False)
    if _is_secret(field) or value is None or value is PydanticUndefined or value == ():
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _unit(name: str, field: FieldInfo) -> str:
    if _is_secret(field):
        return "table of secrets" if "KeyRing" in repr(field.annotation) else "secret"
    for suffix, unit in _UNITS.items():
        if name.endswith(suffix):
            return unit
    return _kind(field.annotation)


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) is types.UnionType:
        return _kind(next(choice for choice in get_args(annotation) if choice is not type(None)))
    if get_origin(annotation) in {tuple, dict}:
        return "list" if get_origin(annotation) is tuple else "table"
    return _KINDS.get(annotation, "text")
