"""Policies by name, by entry point and by import path."""

import importlib.metadata
import sys
import types

import pytest

from bidikv_server.router.app import create_app
from bidikv_server.router.core import decode_policies, mode_policies, prefill_policies
from bidikv_server.router.policies import ENTRY_POINTS, load_policies
from bidikv_server.router.settings import RouterSettings, SettingsError


class Mine:
    """A policy of somebody's own."""

    def __call__(self, view):
        return view.candidates[-1], "mine"


class Needy:
    """A policy that cannot be made without arguments."""

    def __init__(self, needed):
        self.needed = needed


def settings(**fields):
    return RouterSettings(prefill=("http://p",), decode=("http://d",), **fields)


@pytest.fixture
def module(monkeypatch):
    """An importable module with policies."""
    made = types.ModuleType("policies_of_mine")
    made.Mine, made.Needy, made.function, made.number = Mine, Needy, prefill_policies.least_loaded, 3
    monkeypatch.setitem(sys.modules, "policies_of_mine", made)
    return made


def test_built_in():
    """The defaults, and what settings say of them."""
    policies = load_policies(settings(pressure_margin=3))
    assert policies.decode == decode_policies.Sticky(2.0, 3)
    assert policies.prefill is prefill_policies.cached_prefix
    assert policies.mode is mode_policies.readback
    other = settings(
        decode_policy="pinned", prefill_policy="least_loaded", mode_policy="cheapest", alone_tokens=9
    )
    assert load_policies(other).mode == mode_policies.Cheapest(9)


def test_import_path(module):
    """A class is made, a function taken as it is."""
    policies = load_policies(
        settings(decode_policy="policies_of_mine:Mine", prefill_policy="policies_of_mine:function")
    )
    assert isinstance(policies.decode, Mine)
    assert policies.prefill is module.function


def test_entry_point(module, monkeypatch):
    """A package that is installed offers its policies under short names."""
    entry = importlib.metadata.EntryPoint("decode_policy.mine", "policies_of_mine:Mine", ENTRY_POINTS)

    def found(*, group, name):
        return [entry] if (group, name) == (entry.group, entry.name) else []

    monkeypatch.setattr("bidikv_server.router.policies.entry_points", found)
    assert isinstance(load_policies(settings(decode_policy="mine")).decode, Mine)
    with pytest.raises(SettingsError, match="prefill_policy: there is no policy 'mine'"):
        load_policies(settings(prefill_policy="mine"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("stikcy", "there is no policy 'stikcy': use one of 'sticky', 'pinned', 'spread', or"),
        ("no_such_module:x", "'no_such_module:x' cannot be imported"),
        ("policies_of_mine:absent", "'policies_of_mine:absent' cannot be imported"),
        (":x", "':x' cannot be imported"),
        ("policies_of_mine:number", "'policies_of_mine:number' cannot be called"),
        ("policies_of_mine:Needy", "'policies_of_mine:Needy' cannot be made without arguments"),
    ],
)
def test_bad_names(module, name, said):
    """One line that names the setting, before the router starts."""
    with pytest.raises(SettingsError, match=f"^decode_policy: {said}") as raised:
        create_app(settings(decode_policy=name))
    assert "\n" not in str(raised.value)
