"""The compose file: well formed, and in step with what router and engines really do."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any
from urllib.parse import urlsplit

import pytest
from deployed import DEPLOY, VARIABLES, documents, parse
from pydantic import BaseModel, ConfigDict, Field
from typer.testing import CliRunner

from bidikv_server.cli.app import app
from bidikv_server.router.app import create_app
from bidikv_server.router.settings import RouterSettings

Duration = Annotated[str, Field(pattern=r"^\d+[smh]$")]


class Strict(BaseModel):
    """A part of the compose specification, as far as this file uses it: a key that stands elsewhere is an error."""

    model_config = ConfigDict(extra="forbid")


class Build(Strict):
    """How an image is built."""

    context: str
    dockerfile: str
    target: str


class Healthcheck(Strict):
    """When a container is healthy."""

    test: list[str]
    interval: Duration
    timeout: Duration
    retries: int
    start_period: Duration = "0s"


class Mount(Strict):
    """A folder of the host."""

    type: str
    source: str
    target: str
    read_only: bool


class Service(Strict):
    """One container."""

    image: str
    command: list[str]
    healthcheck: Healthcheck
    networks: dict[str, dict[str, str]] | list[str]
    restart: str
    build: Build | None = None
    environment: dict[str, str | None] = {}
    init: bool = False
    ipc: str | None = None
    shm_size: str | None = None
    stop_grace_period: Duration = "10s"
    read_only: bool = False
    tmpfs: list[str] = []
    security_opt: list[str] = []
    cap_drop: list[str] = []
    user: str | None = None
    volumes: list[Mount] = []
    ports: list[str] = []
    depends_on: list[str] = []
    deploy: dict[str, Any] = {}


class Compose(Strict):
    """The file."""

    name: str
    services: dict[str, Service]
    networks: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def compose() -> Compose:
    (content,) = documents(DEPLOY / "compose.yaml")
    return Compose(**{key: value for key, value in content.items() if not key.startswith("x-")})


ENGINES = {"prefill": 8100, "decode": 8200}


def test_images_and_targets(compose):
    """Every image has a tag; what is built is a target of the Dockerfile, from the repository's root."""
    stages = re.findall(r"^FROM \S+ AS (\w+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    for service in compose.services.values():
        assert not re.search(r":latest$|^[^:]+$", service.image)
        if service.build is not None:
            assert service.build.target in stages
            assert (DEPLOY / service.build.context / service.build.dockerfile).samefile(DEPLOY / "Dockerfile")


def test_the_routers_command_line_and_settings(compose, no_variables):
    """The real settings take both, and the engines it names are those of the file."""
    router = compose.services["router"]
    for name, value in router.environment.items():
        assert name in VARIABLES
        no_variables.setenv(name, "hush" if value is None or value.startswith("${") else value)
    checked = CliRunner().invoke(app, [*router.command, "--check"])
    assert checked.exit_code == 0, checked.output
    assert "hush" not in checked.output
    read = parse(router.command)
    for role, port in ENGINES.items():
        address = compose.services[role].networks["engines"]["ipv4_address"]
        assert read[role] == [f"http://{address}:{port}"]
    assert read["host"] == "0.0.0.0"
    grace_s = float(router.environment["BIDIKV_ROUTER_SHUTDOWN_GRACE_S"] or 0)
    assert int(router.stop_grace_period.removesuffix("s")) >= grace_s + 10


def test_the_shared_state_is_there(compose):
    """The server that the router is told of is a service beside it, watched, on a network of both."""
    state = urlsplit(compose.services["router"].environment["BIDIKV_ROUTER_STATE_URL"])
    server = compose.services[state.hostname]
    assert (state.scheme, state.port) == ("redis", 6379)
    assert server.command[0] == "valkey-server"
    assert set(server.networks) & set(compose.services["router"].networks) == {"engines"}


def test_keys_reach_the_router_only_if_they_are_set(compose):
    """An empty variable would be a wrong key: they are passed on, not defaulted."""
    environment = compose.services["router"].environment
    assert {name for name, value in environment.items() if value is None} == {
        "BIDIKV_ROUTER_API_KEY", "BIDIKV_ROUTER_ADMIN_KEY",
    }  # fmt: skip


@pytest.mark.parametrize("role", list(ENGINES))
def test_the_engines_command_lines(compose, role):
    """The real command line takes them; an engine binds to the address that its peers are told."""
    engine = compose.services[role]
    read = parse(engine.command)
    address = engine.networks["engines"]["ipv4_address"]
    (subnet,) = compose.networks["engines"]["ipam"]["config"]
    assert ipaddress.ip_address(address) in ipaddress.ip_network(subnet["subnet"])
    assert (read["host"], read["port"] or ENGINES[role]) == (address, ENGINES[role])
    assert str(read["model"]) == engine.volumes[0].target
    assert set(engine.environment) <= VARIABLES
    assert f"http://{address}:{ENGINES[role]}/health" in engine.healthcheck.test[-1]


def test_every_container_is_watched(compose):
    """The router by an endpoint that it has, on its port; whoever is waited for has a check."""
    router = compose.services["router"]
    (url,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", router.healthcheck.test[-1])
    endpoints = create_app(RouterSettings(prefill=("http://p",), decode=("http://d",)))._endpoints
    assert "GET" in endpoints[url[1]]
    assert router.ports == [f"127.0.0.1:{url[0]}:{url[0]}"]
    assert int(url[0]) == RouterSettings.model_fields["port"].default
    assert set(router.depends_on) <= set(compose.services)
    # The router is there before its engines are: it waits for them itself.
    assert not set(router.depends_on) & set(ENGINES)


def test_the_side_channel_stays_inside(compose):
    """Engines are in a network without a way out, and publish no port."""
    assert compose.networks["engines"]["internal"] is True
    for role in ENGINES:
        assert set(compose.services[role].networks) == {"engines"}
        assert compose.services[role].ports == []


def test_containers_have_no_more_rights_than_they_need(compose):
    """None keeps a capability, and none that is not ours runs as root."""
    for service in compose.services.values():
        assert service.build is not None or (service.user or "0").split(":")[0] != "0"
        assert service.cap_drop == ["ALL"]
        assert "no-new-privileges:true" in service.security_opt
    assert all(compose.services[name].read_only for name in ("router", "valkey"))
