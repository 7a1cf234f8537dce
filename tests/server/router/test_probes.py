"""Learning which engines are up and where their indexes are."""

import pytest
from fake_engine import eventually

from bidikv_server.router.core.engines import IndexInfo, Role
from bidikv_server.router.probes import parse_index_info


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ()),
        ('vllm:x 1\n# HELP bidikv:index_info x\nbidikv:index_information{address="h:1"} 1\n', ()),
        ('bidikv:index_info{engine_id="e",engine="0",address="h:1"} 1', (IndexInfo("e", "h:1"),)),
        (
            'bidikv:index_info{address="[::1]:9",model_name="a,b\\"}",engine_id="e"} 1.0',
            (IndexInfo("e", "[::1]:9"),),
        ),
        ('bidikv:index_info{address="h:1",engine_id="e"} 0', ()),
        ('bidikv:index_info{address="h:1 x",engine_id="e"} 1', ()),
        ('bidikv:index_info{engine_id="e"} 1', ()),
        ("bidikv:index_info{broken", ()),
        (
            "".join(
                f'bidikv:index_info{{engine_id="e",engine="{n}",address="h:{n}"}} 1\n' for n in (10, 2, 0)
            ),
            (IndexInfo("e", "h:0"), IndexInfo("e", "h:2"), IndexInfo("e", "h:10")),
        ),
    ],
)
def test_parse(text, found):
    """Any label order, one line per rank, and nothing that is not an address."""
    assert parse_index_info(text) == found


@pytest.mark.anyio
async def test_load_is_learnt_from_probes(start):
    """Both roles say how busy they are; an engine that was down is told of as soon as it answers."""
    came_up = []
    cluster = await start()
    for engine in (cluster.prefill[0], cluster.decode[0]):
        engine.index_lines += 'vllm:num_requests_running{engine="0"} 3.0\n'
    cluster.app._prober._came_up = lambda url, _now_s: came_up.append(url)
    await cluster.probe()
    assert [cluster.app.engines.snapshots(role)[0].others for role in Role] == [3, 3]
    assert came_up == []
    cluster.decode[0].healthy = False
    await cluster.probe()
    cluster.decode[0].healthy = True
    await cluster.probe()
    assert came_up == [cluster.urls["decode-0"]]


@pytest.mark.anyio
async def test_probing_goes_on(start):
    """An engine that comes up, goes down and is replaced is noticed without any request."""
    cluster = await start(probe_interval_s=0.02)
    engine = cluster.decode[0]

    def state():
        (snapshot,) = cluster.app.engines.snapshots(Role.DECODE)
        return snapshot.healthy, tuple(index.engine_id for index in snapshot.indexes)

    assert state() == (True, ("id-0-0",))
    engine.healthy = False
    await eventually(lambda: state() == (False, ()))
    engine.publish_index("reborn", "10.0.0.0:7000", "10.0.0.0:7001")
    engine.healthy = True
    await eventually(lambda: state() == (True, ("reborn-0", "reborn-1")))


@pytest.mark.anyio
async def test_prefill_metrics_are_not_read(start):
    """Only decode engines have an index."""
    cluster = await start()
    cluster.prefill[0].publish_index("x", "10.0.0.9:1")
    await cluster.probe()
    assert cluster.app.engines.snapshots(Role.PREFILL)[0].indexes == ()
