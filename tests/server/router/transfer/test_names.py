"""Names of transfer systems, alone and combined."""

import pytest

from bidikv_server.router.settings import RouterSettings, SettingsError
from bidikv_server.router.transfer.names import MOVERS, STORES, parse
from bidikv_server.router.transfer.registry import build
from bidikv_server.router.upstream import EngineClient

URLS = {"prefill": ("http://p",), "decode": ("http://d",)}


@pytest.mark.parametrize(
    "name", [*MOVERS, *STORES, *(f"{mover}+lmcache" for mover in MOVERS if mover != "nixl-bidirectional")]
)
def test_every_name_has_an_adapter(name):
    """The setting and the adapter agree on the name."""
    settings = RouterSettings(**URLS, transfer=name)
    assert build(settings, EngineClient(connect_timeout_s=1.0)).name == name


def test_the_mover_comes_first():
    """However it is written."""
    assert parse(" lmcache + nixl ") == ("nixl", "lmcache")
    assert RouterSettings(**URLS, transfer="lmcache+nixl").transfer == "nixl+lmcache"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("", "'' is no transfer system; there are bidikv, nixl,"),
        ("NIXL", "'NIXL' is no transfer system"),
        ("nixl+", "'' is no transfer system"),
        ("nixl+nixl", "names a system twice"),
        ("nixl+mooncake", "nixl and mooncake cannot be combined"),
        ("bidikv+nixl-push", "bidikv and nixl-push cannot be combined"),
        ("nixl-bidirectional+lmcache", "nixl-bidirectional cannot be combined"),
    ],
)
def test_wrong_names(value, says):
    """One line that begins with the setting's name."""
    with pytest.raises(SettingsError, match=r"^transfer: ") as error:
        RouterSettings.load(**URLS, transfer=value)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("table", [{"http://p": "p:8998"}, {"p": "http://p:1"}, {"http://p/x": "http://p"}])
def test_wrong_bootstrap(table):
    """Both sides are base URLs."""
    with pytest.raises(SettingsError, match=r"^mooncake_bootstrap: "):
        RouterSettings.load(**URLS, mooncake_bootstrap=table)


def test_bootstrap_from_the_environment(monkeypatch):
    """As JSON; slashes at the end do not matter."""
    monkeypatch.setenv("BIDIKV_ROUTER_MOONCAKE_BOOTSTRAP", '{"http://p/": "http://p:9000/"}')
    assert RouterSettings.load(**URLS).mooncake_bootstrap == {"http://p": "http://p:9000"}
