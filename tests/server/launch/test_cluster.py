"""A whole cluster: the real launcher and router over stand-ins for vLLM."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from bidikv_server.launch.cluster import Cluster, ClusterSpec, plan_engines
from bidikv_server.launch.errors import ChildDiedError, ModelError, PortInUseError, StartTimeoutError
from bidikv_server.launch.ports import free_ports, is_free
from bidikv_server.launch.readiness import index_address, is_healthy
from bidikv_server.launch.recipe import EngineSpec


def spec(model: Path, tmp_path: Path, **changes) -> ClusterSpec:
    return ClusterSpec(model, **{"log_dir": tmp_path / "logs", "start_timeout_s": 30.0, **changes})


def alive(pids: list[int]) -> list[int]:
    """Those that live; a zombie does not."""
    return [pid for pid in pids if _state(pid) not in {"", "Z", "X"}]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_every_engine_gets_a_role_and_ports_of_its_own(model):
    """Prefill first, three ports each, prefix caching set for prefill alone."""
    cluster = ClusterSpec(model, prefill=2, decode=1, prefill_prefix_caching=False)
    engines = plan_engines(cluster, list(range(1, 10)), EngineSpec("prefill", model, 0, 0, 0, "cpu"))
    assert {
        name: (e.role, e.port, e.nixl_port, e.index_port, e.prefix_caching) for name, e in engines.items()
    } == {
        "prefill-0": ("prefill", 1, 2, 3, False),
        "prefill-1": ("prefill", 4, 5, 6, False),
        "decode-0": ("decode", 7, 8, 9, None),
    }


def test_arguments_can_be_for_one_role(model):
    """They come after those for every engine, so that they win."""
    cluster = ClusterSpec(
        model, engine_args=("--a", "1"), prefill_args=("--a", "2"), decode_args=("--b", "3")
    )
    template = EngineSpec("prefill", model, 0, 0, 0, "cpu", extra_args=cluster.engine_args)
    engines = plan_engines(cluster, list(range(6)), template)
    assert {name: engine.extra_args for name, engine in engines.items()} == {
        "prefill-0": ("--a", "1", "--a", "2"),
        "decode-0": ("--a", "1", "--b", "3"),
    }


@pytest.mark.usefixtures("fake_vllm")
def test_a_cluster_serves_until_it_is_left(model, tmp_path):
    """Inside the block everything answers; after it no process is left."""
    lines: list[str] = []
    with Cluster(spec(model, tmp_path, prefill=2), progress=lines.append) as cluster:
        assert is_healthy(cluster.router_url)
        assert [is_healthy(url) for url in cluster.prefill_urls] == [True, True]
        assert index_address(cluster.decode_urls[0])
        assert cluster.base_url == f"{cluster.router_url}/v1"
        assert cluster.model_name == "tiny-model"
        pids = cluster.pids()
        assert len(pids) >= 7
        # One secret for all, or the router could tell no index anything.
        leaders = [cluster.group_of(name) for name in cluster.members()]
        environments = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in leaders]
        assert all(f"BIDIKV_SECRET={cluster.secret}".encode() in found for found in environments)
    assert alive(pids) == []
    assert {path.name for path in cluster.log_dir.iterdir()} == {
        "prefill-0.log",
        "prefill-1.log",
        "decode-0.log",
        "router.log",
    }
    assert any("ready after" in line for line in lines)


@pytest.mark.skipif(not is_free("::1", 0), reason="this machine has no IPv6 loopback")
@pytest.mark.usefixtures("fake_vllm")
def test_a_cluster_can_live_on_ipv6(model, tmp_path):
    """Every address of it is one that a client can use."""
    with Cluster(spec(model, tmp_path, host="::1")) as cluster:
        assert cluster.base_url.startswith("http://[::1]:")
        urls = [cluster.router_url, *cluster.prefill_urls, *cluster.decode_urls]
        assert all(is_healthy(url) for url in urls)


@pytest.mark.usefixtures("fake_vllm")
def test_prefill_can_be_restarted_without_its_cache(model, tmp_path):
    """New processes on the same ports; decode and router stay."""
    with Cluster(spec(model, tmp_path)) as cluster:
        before, urls = set(cluster.pids()), cluster.prefill_urls
        cluster.restart_prefill(prefix_caching=False)
        after = set(cluster.pids())
        assert cluster.prefill_urls == urls
        assert is_healthy(urls[0])
        # API server and engine core.
        assert (len(after - before), len(before - after)) == (2, 2)


@pytest.mark.usefixtures("fake_vllm")
@pytest.mark.parametrize("name", ["decode-0", "prefill-0", "router"])
def test_a_member_can_be_killed_and_restarted(model, tmp_path, name):
    """As after a crash: new processes on the same ports, and the others stay."""
    with Cluster(spec(model, tmp_path)) as cluster:
        urls = {
            "decode-0": cluster.decode_urls[0],
            "prefill-0": cluster.prefill_urls[0],
            "router": cluster.router_url,
        }
        assert cluster.members() == ["prefill-0", "decode-0", "router"]
        before, group = set(cluster.pids()), cluster.group_of(name)
        cluster.kill(name)
        assert not is_healthy(urls[name])
        assert set(cluster.pids()) < before
        cluster.raise_if_dead()
        cluster.kill(name)
        cluster.restart(name)
        assert all(is_healthy(url) for url in urls.values())
        assert cluster.group_of(name) != group
        assert len(cluster.pids()) == len(before)


@pytest.mark.usefixtures("fake_vllm")
def test_stock_mode_waits_for_no_index(model, tmp_path):
    """Engines without readback publish none, and the cluster is ready all the same."""
    with Cluster(spec(model, tmp_path, readback=False)) as cluster:
        assert index_address(cluster.decode_urls[0]) is None


@pytest.mark.usefixtures("fake_vllm")
def test_an_engine_that_dies_while_starting_fails_at_once(model, tmp_path):
    """The error has its last lines and the fix, and nothing stays behind."""
    cluster = Cluster(spec(model, tmp_path, engine_env={"FAKE_VLLM_FAIL": "torchvision::nms does not exist"}))
    with (
        pytest.raises(
            ChildDiedError, match=r"(?s)(prefill|decode)-0 ended with exit code 1.*pip uninstall.*nms"
        ),
        cluster,
    ):
        pytest.fail("it started")
    assert cluster.pids() == []


def test_an_engine_that_never_gets_ready_times_out(model, tmp_path, fake_vllm):
    """The error names it and shows its log."""
    program = tmp_path / "stuck"
    shutil.copytree(fake_vllm, program)
    server = program / "vllm" / "entrypoints" / "openai" / "api_server.py"
    server.write_text("import time\nprint('loading', flush=True)\ntime.sleep(600)\n")
    cluster = Cluster(spec(model, tmp_path, start_timeout_s=4.0, engine_env={"PYTHONPATH": str(program)}))
    with (
        pytest.raises(StartTimeoutError, match=r"(?s)prefill-0, decode-0 not ready after 4 s.*loading"),
        cluster,
    ):
        pytest.fail("it started")


def test_a_missing_model_is_refused_before_anything_starts(tmp_path):
    """With the command that prepares one."""
    with pytest.raises(ModelError, match="bidikv model smollm2"), Cluster(spec(tmp_path / "no", tmp_path)):
        pytest.fail("it started")
    assert not (tmp_path / "logs").exists()


def test_a_taken_router_port_is_refused_before_anything_starts(model, tmp_path, taken_port):
    """With its holder."""
    cluster = Cluster(spec(model, tmp_path, port=taken_port))
    with pytest.raises(PortInUseError, match=str(os.getpid())), cluster:
        pytest.fail("it started")
    assert not (tmp_path / "logs").exists()


@pytest.mark.usefixtures("fake_vllm")
def test_the_router_port_can_be_chosen(model, tmp_path):
    """Scripts rely on it."""
    port = free_ports(1)[0]
    with Cluster(spec(model, tmp_path, port=port)) as cluster:
        assert cluster.router_url == f"http://127.0.0.1:{port}"
