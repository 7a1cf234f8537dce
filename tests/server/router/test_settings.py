"""Where settings come from, and how a wrong one is told."""

import os
from pathlib import Path

import pytest

from bidikv_server.router.effective import as_toml
from bidikv_server.router.reference import as_markdown, sections
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
        (
            {"prefill": ()},
            "prefill: at least one engine is needed: a URL, a dns:// name, or engines_file",
        ),
        (
            {"prefill": "", "decode": ()},
            (
                "prefill: at least one engine is needed: a URL, a dns:// name, or engines_file; "
                "decode: at least one engine is needed: a URL, a dns:// name, or engines_file"
            ),
        ),
        (
            {"decode": "localhost"},
            (
                "decode: 'localhost' is not an engine's base URL or name "
                "(http://host:port, dns://name:port or dns://_service._proto.name)"
            ),
        ),
        ({"decode": "dns://d"}, "decode: 'dns://d' has no port: write dns://d:port"),
        (
            {"dns_server": "dns.local"},
            "dns_server: 'dns.local' is no name server (10.0.0.10, 10.0.0.10:53 or [fd00::10]:53)",
        ),
        ({"dns_interval_s": 0}, "dns_interval_s: Input should be greater than 0"),
        ({"decode": "http://d:1,http://d:1/"}, "decode: an engine is listed twice"),
        ({"prot": 1}, "prot: unknown setting"),
        ({"port": "x"}, "port: Input should be a valid integer, unable to parse string as an integer"),
        ({"idle_timeout_s": 0}, "idle_timeout_s: Input should be greater than 0"),
        ({"default_ttl_s": 500}, "default_ttl_s (500) is above max_ttl_s (480)"),
        (
            {"state_url": "http://x"},
            "state_url: is not the address of a Redis server (redis://host:port, or rediss:// over TLS)",
        ),
        (
            {"state_url": "redis://:hush@x/y"},
            "state_url: names no database: the path is its number or nothing",
        ),
        ({"state_url": "redis://x:99999"}, "state_url: has a port that is none"),
        ({"state_prefix": "a b"}, "state_prefix: String should match pattern '^[\\x21-\\x7e]{1,64}$'"),
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
    """docs/settings.md is what the settings themselves say; each stands in a section, with a meaning."""
    page = (Path(__file__).parents[3] / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == as_markdown(), "run: python scripts/write_settings.py"
    rows = [row for _, section in sections() for row in section]
    assert sorted(row.name for row in rows) == sorted(RouterSettings.model_fields)
    assert [row.name for row in rows if not row.meaning or not row.unit] == []


def test_the_table_of_settings():
    """Defaults, units and kinds as a reader would write them; of secrets there is no default."""
    rows = {row.name: row for _, section in sections() for row in section}
    told = {name: (rows[name].default, rows[name].unit) for name in rows}
    assert told["host"] == ("127.0.0.1", "text")
    assert told["port"] == ("8000", "number")
    assert told["prefill"] == ("none", "list")
    assert told["readback"] == ("true", "true or false")
    assert told["dns_interval_s"] == ("5", "seconds")
    assert told["max_body_bytes"] == ("67108864", "bytes")
    assert told["tls_cert_file"] == ("none", "file")
    assert told["max_in_flight"] == ("none", "number")
    assert told["log_level"] == ("info", "one of `debug`, `info`, `warning`, `error`")
    assert told["api_keys"] == ("none", "table of secrets")
    assert told["secret"] == told["admin_key"] == told["upstream_api_key"] == ("none", "secret")
    assert rows["max_queue"].variable == "BIDIKV_ROUTER_MAX_QUEUE"


def test_the_settings_in_effect_can_be_read_back(environment, toml):
    """As a file they give the same settings, except for secrets, which are not in it."""
    environment.setenv("BIDIKV_SECRET", "sk-side")
    secrets = {
        "api_key": "sk-one",
        "admin_key": "sk-admin",
        "upstream_api_key": "sk-up",
        "api_keys": {"sk-a": "a"},
    }
    settings = RouterSettings.load(
        toml('host = "::1"\ntls_cert_file = "a \\"b\\" \\\\ c.pem"\nreadback = false\nmax_in_flight = 7\n'),
        **{**ENGINES, "decode": "dns://d.svc:1,https://d:2"},
        **secrets,
    )
    shown = as_toml(settings)
    assert "sk-" not in shown
    assert "# api_keys: 1 keys of 1 tenants" in shown
    assert "# admin_key: **********" in shown
    assert "# engines_file: not set" in shown
    environment.delenv("BIDIKV_SECRET")
    again = RouterSettings.load(toml(shown))
    hidden = {*secrets, "secret"}
    assert again.model_dump(exclude=hidden) == settings.model_dump(exclude=hidden)
    assert again.model_dump(include=hidden) == RouterSettings(**ENGINES).model_dump(include=hidden)


def test_the_side_channels_secret(environment, toml):
    """It comes from the variable that engines read too, and shows nowhere."""
    environment.setenv("BIDIKV_SECRET", "hush")
    settings = RouterSettings.load(toml('secret = "file"'), **ENGINES)
    assert settings.secret.get_secret_value() == "hush"
    assert "hush" not in repr(settings) + settings.model_dump_json()
    environment.delenv("BIDIKV_SECRET")
    assert RouterSettings.load(toml('secret = "file"'), **ENGINES).secret.get_secret_value() == "file"


def test_the_shared_states_password():
    """It may be in the URL or beside it, and shows nowhere."""
    for url, shown in {
        "redis://:hush@h:1/2": "redis://:**********@h:1/2",
        "rediss://me:hush@[::1]/?ssl_ca_certs=hush": "rediss://me:**********@[::1]/",
        "redis://h": "redis://h",
    }.items():
        settings = RouterSettings.load(**ENGINES, state_url=url, state_password="hush")
        assert settings.state_url.value == url
        assert settings.model_dump(mode="json")["state_url"] == shown
        assert "hush" not in repr(settings) + settings.model_dump_json()
