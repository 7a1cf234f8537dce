"""A second router in front of a cluster's engines, with settings of its own and a look at why it placed what where."""

import contextlib
import json
import os
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from bidikv_server.launch import readiness
from bidikv_server.launch.cluster import Cluster
from bidikv_server.launch.ports import free_ports, http_url
from bidikv_server.launch.process import Children, ChildSpec

ADMIN_KEY = "sk-admin"
PATIENCE_S = 60.0
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Through:
    """A cluster as it is seen through another router; all that a player asks of a cluster."""

    router_url: str
    engines: Cluster

    @property
    def model_name(self):
        return self.engines.model_name

    @property
    def prefill_urls(self):
        return self.engines.prefill_urls

    @property
    def decode_urls(self):
        return self.engines.decode_urls

    @property
    def base_url(self):
        return f"{self.router_url}/v1"

    def ask(self, path, body=None):
        """The admin API's answer."""
        request = urllib.request.Request(  # noqa: S310
            f"{self.router_url}/bidikv/v1/{path}",
            json.dumps(body).encode() if body is not None else None,
            {"Authorization": f"Bearer {ADMIN_KEY}"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return json.load(answer)

    def last_turn(self):
        """What is told of the turn that was answered last, of whatever conversation. It is known before its client sees its end."""
        (used_last,) = self.ask("conversations?limit=1")["data"]
        return self.ask(f"conversations/{used_last['key']}")["recent"][0]

    def engine(self, url):
        """What the router knows of an engine."""
        return next(engine for engine in self.ask("engines")["data"] if engine["url"] == url)

    def wait(self, url, condition):
        """Until what the router knows of an engine is so."""
        until(lambda: condition(self.engine(url)), lambda: self.engine(url))


@contextlib.contextmanager
def router(cluster, **settings):
    """A router of its own with these settings."""
    (port,) = free_ports(1)
    argv = (sys.executable, "-m", "bidikv_server.cli", "router", "--port", str(port))
    for role, urls in (("prefill", cluster.prefill_urls), ("decode", cluster.decode_urls)):
        argv += tuple(word for url in urls for word in (f"--{role}", url))
    settings = {"admin_key": ADMIN_KEY, "probe_interval_s": 0.2, "shutdown_grace_s": 2, **settings}
    env = {f"BIDIKV_ROUTER_{name.upper()}": str(value) for name, value in settings.items()}
    # For policies of these tests.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    log = Path(tempfile.mkdtemp(prefix="bidikv-router-")) / "router.log"
    engines = len(cluster.prefill_urls) + len(cluster.decode_urls)
    with Children() as children:
        child = children.start(ChildSpec("router", argv, {**os.environ, **env}, log))
        url = http_url("127.0.0.1", port)

        def ready():
            child.raise_if_dead()
            return readiness.router_is_ready(url, engines, len(cluster.decode_urls))

        until(ready, child.log_tail)
        yield Through(url, cluster)


def until(condition, explain):
    """Wait for a condition that another process brings about."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, explain()
        time.sleep(0.05)
