"""Where settings come from, and how a wrong one is told."""

import os
import re
from pathlib import Path

import pytest

from bidikv_server.router.settings import RouterSettings, SettingsError

ENGINES = {"prefill": ("http://p:1",), "decode": ("http://d:1",)}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No setting leaks in from outside."""
    for name in [name for name in os.environ if name.upper().startswith("BIDIKV_ROUTER_")]:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def toml(tmp_path):
    def write(text: str):
        path = tmp_path / "router.toml"
        path.write_text(text)
        return path

    return write


def test_precedence(environment, toml):
    """Overrides win over the environment, which wins over the file, which wins over defaults."""
    path = toml('prefill = ["http://file:1"]\ndecode = ["http://file:2/"]\nport = 1\nhost = "::1"\n')
    environment.setenv("BIDIKV_ROUTER_PORT", "2")
    environment.setenv("BIDIKV_ROUTER_PREFILL", "http://env:1, http://[::1]:2")
    settings = RouterSettings.load(path, port=3, host=None)
    assert (settings.port, settings.host, settings.default_ttl_s) == (3, "::1", 480.0)
    assert settings.prefill == ("http://env:1", "http://[::1]:2")
    assert settings.decode == ("http://file:2",)
    assert RouterSettings.load(path).port == 2


def test_construction_reads_nothing(environment):
    """Only `load` looks at the environment."""
    environment.setenv("BIDIKV_ROUTER_PORT", "2")
    assert RouterSettings(**ENGINES).port == 8000


def test_frozen():
    """Settings do not change under way."""
    with pytest.raises(ValueError, match="frozen"):
        RouterSettings(**ENGINES).port = 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"prefill": ()}, "prefill: at least one engine URL is needed"),
        ({"decode": "localhost"}, "decode: 'localhost' is not an engine's base URL (http://host:port)"),
        (
            {"decode": "http://d:1/v1"},
            "decode: 'http://d:1/v1' is not an engine's base URL (http://host:port)",
        ),
        ({"decode": "http://d:1,http://d:1/"}, "decode: an engine is listed twice"),
        ({"prot": 1}, "prot: unknown setting"),
        ({"port": "x"}, "port: Input should be a valid integer, unable to parse string as an integer"),
        ({"idle_timeout_s": 0}, "idle_timeout_s: Input should be greater than 0"),
        ({"default_ttl_s": 500}, "default_ttl_s (500) is above max_ttl_s (480)"),
        ({"log_level": "loud"}, "log_level: Input should be 'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_wrong_value(overrides, message):
    """One line that begins with the key."""
    with pytest.raises(SettingsError) as caught:
        RouterSettings.load(**{**ENGINES, **overrides})
    assert str(caught.value) == message


def test_wrong_key_in_file(toml):
    """A misspelt key in the file is named."""
    with pytest.raises(SettingsError, match=r"^prefil: unknown setting"):
        RouterSettings.load(toml('prefil = ["http://p:1"]'), **ENGINES)


def test_wrong_variable(environment):
    """A misspelt variable is named."""
    environment.setenv("BIDIKV_ROUTER_PROT", "1")
    with pytest.raises(SettingsError, match=r"^BIDIKV_ROUTER_PROT: unknown setting$"):
        RouterSettings.load(**ENGINES)


def test_bad_toml(toml, tmp_path):
    """A file that cannot be read or parsed is named, with the place."""
    with pytest.raises(SettingsError, match=r"router.toml is not valid TOML: .*line 1"):
        RouterSettings.load(toml("port = = 1"))
    with pytest.raises(SettingsError, match=r"cannot read .*missing.toml"):
        RouterSettings.load(tmp_path / "missing.toml")


def test_every_setting_is_documented():
    """Each one has its row in docs/router.md, with its default, and nothing else has."""
    page = (Path(__file__).parents[3] / "docs" / "router.md").read_text(encoding="utf-8")
    table = page.partition("## Settings")[2].partition("## Tenants")[0]
    rows = {}
    for row in re.findall(r"^\| (`.*) \| .* \|$", table, re.MULTILINE):
        names, _, defaults = row.partition(" | ")
        names = re.findall(r"`(\w+)`", names)
        values = [value.strip("` ") for value in defaults.split(",")]
        rows |= dict(zip(names, values * (1 if len(values) > 1 else len(names)), strict=True))
    assert set(rows) == set(RouterSettings.model_fields)
    shown = {None: "none", True: "true", False: "false"}
    for name, value in RouterSettings(**ENGINES):
        if name in {*ENGINES, "api_keys", "secret"}:
            continue
        plain = shown[value] if value is None or isinstance(value, bool) else value
        assert rows[name] == (f"{plain:g}" if isinstance(plain, float) else str(plain)), name


def test_the_side_channels_secret(environment, toml):
    """It comes from the variable that engines read too, and shows nowhere."""
    environment.setenv("BIDIKV_SECRET", "hush")
    settings = RouterSettings.load(toml('secret = "file"'), **ENGINES)
    assert settings.secret.get_secret_value() == "hush"
    assert "hush" not in repr(settings) + settings.model_dump_json()
    environment.delenv("BIDIKV_SECRET")
    assert RouterSettings.load(toml('secret = "file"'), **ENGINES).secret.get_secret_value() == "file"
