"""Parts 3 and 5: what an idle decode engine pays for what it retains, in processor time and in blocks."""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bidikv_server.launch.groups import group_members
from comparison.calls import page, post
from comparison.histories import DIVERGENCES
from comparison.wrong_answers import chat

if TYPE_CHECKING:
    from collections.abc import Callable

    from bidikv_server.launch.cluster import Cluster
    from comparison.players import Player

DECODE = "decode-0"
_SETTLE_S = 4.0
"""Both connectors poll NIXL fast for two seconds after a transfer."""
_TICKS_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Idle:
    """An idle decode engine, before anything was retained and while something is.

    Attributes:
        seconds: Length of each of the two windows.
        before: Processor seconds per second of the whole process tree, nothing retained.
        retaining: The same while retaining.
        turns: Turns retained meanwhile.
        blocks: Blocks of the engine.
        unavailable_blocks: Blocks that count as used at the end, with nothing running.
    """

    seconds: float
    before: float
    retaining: float
    turns: int
    blocks: int
    unavailable_blocks: int


def before_retention(player: Player, seconds: float, say: Callable[[str], None]) -> float:
    """The idle engine's share of a core, after a request that leaves nothing behind."""
    body = chat(player.cluster.model_name, DIVERGENCES[0].first, uuid.uuid4().hex)
    for url in (*player.cluster.prefill_urls, *player.cluster.decode_urls):
        post(f"{url}/v1/chat/completions", body)
    return _idle_share(player.cluster, seconds, say, "nothing retained")


def while_retaining(player: Player, seconds: float, before: float, say: Callable[[str], None]) -> Idle:
    """The same after some turns whose conversations may go on."""
    turns = [divergence.first for divergence in DIVERGENCES[:3]]
    for messages in turns:
        body = chat(player.cluster.model_name, messages, uuid.uuid4().hex)
        player.play(body, session=uuid.uuid4().hex)
    retaining = _idle_share(player.cluster, seconds, say, f"{len(turns)} turns retained")
    blocks, unavailable = used_blocks(player.cluster.decode_urls[0])
    say(f"  {unavailable} of {blocks} blocks unavailable with nothing running")
    return Idle(seconds, before, retaining, len(turns), blocks, unavailable)


def used_blocks(engine_url: str) -> tuple[int, int]:
    """How many blocks an engine has, and how many of them count as used now."""
    metrics = page(engine_url)
    blocks = int(metrics.label("vllm:cache_config_info", "num_gpu_blocks"))
    # One block is vLLM's own.
    return blocks, round(metrics.value("vllm:kv_cache_usage_perc") * (blocks - 1))


def cpu_seconds(group: int) -> float:
    """Processor time that the processes now in a group have used, all their threads included."""
    ticks = 0
    for pid in group_members(group):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_S


def _idle_share(cluster: Cluster, seconds: float, say: Callable[[str], None], what: str) -> float:
    time.sleep(_SETTLE_S)
    group = cluster.group_of(DECODE)
    started_s, used_s = time.monotonic(), cpu_seconds(group)
    time.sleep(seconds)
    share = (cpu_seconds(group) - used_s) / (time.monotonic() - started_s)
    say(f"  idle decode engine, {what}: {share:.1%} of a core over {seconds:.0f} s")
    return share
