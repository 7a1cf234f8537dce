"""`BIDIKV_*` variables as arguments of a client. Read by `from_env` and by nothing else."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from bidikv.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

_SWITCH: Final = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def options_from(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Arguments that these variables stand for; those that are not set, or empty, stand for none.

    `BIDIKV_BASE_URL` (with `/v1`), `BIDIKV_API_KEY`, `BIDIKV_SESSION_SECRET` (text), `BIDIKV_READBACK` and
    `BIDIKV_DISABLED` (on or off), `BIDIKV_ON_DRIFT` (ignore, warn or raise), `BIDIKV_RESTORE` (off, spelling or all).

    Raises:
        ConfigurationError: A variable has no such value; its name is in the message, a secret is not.
    """
    variables = os.environ if environment is None else environment
    options: dict[str, Any] = {}
    for name, option in (("BASE_URL", "base_url"), ("API_KEY", "api_key")):
        if value := variables.get(f"BIDIKV_{name}"):
            options[option] = value
    if secret := variables.get("BIDIKV_SESSION_SECRET"):
        options["secret"] = secret.encode()
        if len(options["secret"]) > 64:
            raise ConfigurationError("BIDIKV_SESSION_SECRET is longer than 64 bytes")
    for name, option, when in (("READBACK", "readback", True), ("DISABLED", "enabled", False)):
        if value := variables.get(f"BIDIKV_{name}"):
            options[option] = _one_of(f"BIDIKV_{name}", value, _SWITCH) is when
    choices = {
        "ON_DRIFT": ("on_drift", ("ignore", "warn", "raise")),
        "RESTORE": ("restore", ("off", "spelling", "all")),
    }
    for name, (option, allowed) in choices.items():
        if value := variables.get(f"BIDIKV_{name}"):
            options[option] = _one_of(f"BIDIKV_{name}", value, {word: word for word in allowed})
    return options


def _one_of(name: str, value: str, meanings: Mapping[str, Any]) -> Any:
    try:
        return meanings[value.strip().lower()]
    except KeyError:
        raise ConfigurationError(f"{name} is one of {', '.join(meanings)}, not {value!r}") from None
