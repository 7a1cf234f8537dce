"""The settings in effect as a TOML file that can be read back, secrets hidden."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from bidikv_server.router.core.tenants import KeyRing
from bidikv_server.router.reference import sections
from bidikv_server.router.secrets import KeyDigest

if TYPE_CHECKING:
    from bidikv_server.router.settings import RouterSettings


def as_toml(settings: RouterSettings) -> str:
    """Every setting, by section; those that are not set and secrets stand in comments."""
    values = settings.model_dump(mode="json")
    hidden = {name for name, value in settings if isinstance(value, KeyDigest | KeyRing | SecretStr)}
    values["api_keys"] = _counted(settings.api_keys)
    lines: list[str] = []
    for title, rows in sections():
        lines.append(f"# {title}")
        lines += [_line(row.name, values[row.name], is_secret=row.name in hidden) for row in rows]
        lines.append("")
    return "\n".join(lines)


def _line(name: str, value: Any, *, is_secret: bool) -> str:
    if value is None:
        return f"# {name}: not set"
    return f"# {name}: {value}" if is_secret else f"{name} = {_toml(value)}"


def _counted(ring: KeyRing) -> str | None:
    counts = ring.counts()
    return f"{sum(counts.values())} keys of {len(counts)} tenants" if counts else None


def _toml(value: Any) -> str:
    """JSON's strings, numbers, truth values and lists are TOML's; its objects are almost."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
