"""The placement policies that settings name: built in, an installed package's entry point, or anything importable."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

from bidikv_server.router.core import decode_policies, mode_policies, prefill_policies
from bidikv_server.router.core.policy import Policies
from bidikv_server.router.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bidikv_server.router.settings import RouterSettings

ENTRY_POINTS: Final = "bidikv.policies"
"""Group of entry points; a policy's name in it is that of the setting, a dot, and its own: `decode_policy.mine`."""


def load_policies(settings: RouterSettings) -> Policies:
    """The policies that these settings name.

    Raises:
        SettingsError: There is no such policy, or it cannot be used.
    """
    return Policies(
        decode=_find(
            "decode_policy",
            settings.decode_policy,
            {
                "sticky": decode_policies.Sticky(settings.pressure_ratio, settings.pressure_margin),
                "pinned": decode_policies.pinned,
                "spread": decode_policies.spread,
            },
        ),
        prefill=_find(
            "prefill_policy",
            settings.prefill_policy,
            {
                "cached_prefix": prefill_policies.cached_prefix,
                "least_loaded": prefill_policies.least_loaded,
            },
        ),
        mode=_find(
            "mode_policy",
            settings.mode_policy,
            {"readback": mode_policies.readback, "cheapest": mode_policies.Cheapest(settings.alone_tokens)},
        ),
    )


def _find(setting: str, name: str, built_in: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if name in built_in:
        return built_in[name]
    if ":" in name:
        return _usable(setting, name, _import(setting, name))
    for entry in entry_points(group=ENTRY_POINTS, name=f"{setting}.{name}"):
        return _usable(setting, name, _import(setting, entry.value))
    raise SettingsError(
        f"{setting}: there is no policy {name!r}: use one of {', '.join(map(repr, built_in))}, or a 'module:name' of your own"
    )


def _import(setting: str, path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"{setting}: {path!r} cannot be imported: {error}") from None
    return found


def _usable(setting: str, name: str, found: Any) -> Callable[..., Any]:
    """A function as it is; of a class an object, made without arguments."""
    try:
        policy = found() if isinstance(found, type) else found
    except TypeError as error:
        raise SettingsError(f"{setting}: {name!r} cannot be made without arguments: {error}") from None
    if not callable(policy):
        raise SettingsError(f"{setting}: {name!r} cannot be called, so it is no policy")
    return policy  # type: ignore[no-any-return]
