"""Runs a verification: find or start the cluster, play the plan, report."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from rich.console import Console

import bidikv
from bidikv_server.launch.cluster import Cluster, ClusterSpec
from bidikv_server.launch.model import prepare_smollm2
from bidikv_server.terminal import result_console
from bidikv_server.verify import report
from bidikv_server.verify.chaos import Chaos, plan_kills
from bidikv_server.verify.client import Client
from bidikv_server.verify.judge import Verdict
from bidikv_server.verify.play import Player, Quiet
from bidikv_server.verify.probe import probe
from bidikv_server.verify.requests import Naming
from bidikv_server.verify.results import Result, TurnRecord, feature_row, plan_rows
from bidikv_server.verify.write import write_plan

if TYPE_CHECKING:
    from bidikv_server.verify.options import VerifyOptions
    from bidikv_server.verify.plan import Features, Script
    from bidikv_server.verify.play import Outages
    from bidikv_server.verify.probe import Served

_POLL_S: Final = 0.25
_EMPTY_WITHIN_S: Final = 5.0
_EMPTY_AFTER_CHAOS_S: Final = 45.0
"""A prompt that a killed decode engine did not fetch stays on prefill until NIXL's lease of 30 s has ended."""
_BAD: Final = frozenset({Verdict.MISMATCH, Verdict.HUNG, Verdict.FAILED})


@dataclass(slots=True)
class Verification:
    """One run against one router, with its progress on stderr.

    Attributes:
        options: What was asked for.
        base_url: The router.
        engines: Engines whose KV cache has to be empty in the end.
        cluster: Whose members chaos kills.
        empty_within_s: How soon after the last turn every KV block has to be free.
    """

    options: VerifyOptions
    base_url: str
    engines: tuple[str, ...]
    cluster: Cluster | None = None
    empty_within_s: float = _EMPTY_WITHIN_S
    _records: list[TurnRecord] = field(default_factory=list)
    _progress: Console = field(default_factory=lambda: Console(stderr=True, highlight=False, soft_wrap=True))
    _started_s: float = field(default_factory=time.monotonic)

    async def run(self) -> Result:
        """Play all of it.

        Raises:
            LaunchError: The router cannot be used, or a killed member does not come back.
        """
        options = self.options
        url = self.base_url.rstrip("/").removesuffix("/v1")
        async with Client(url, timeout_s=options.timeout_s, api_key=options.api_key) as client:
            served = await probe(client, self.base_url)
            self._tell_features(served.features)
            plan = write_plan(options.seed, options.turns, served.features)
            scripts = [s for s in plan if options.conversation in {None, s.number}]
            chaos = self._chaos()
            await self._play_all(client, served, scripts, chaos)
            usage = await self._final_usage(client)
        return Result(
            bidikv=bidikv.__version__,
            command=options.replay(),
            seed=options.seed,
            base_url=self.base_url,
            model=served.model,
            features=feature_row(served.features),
            planned_turns=sum(len(script.turns) for script in scripts),
            seconds=round(time.monotonic() - self._started_s, 1),
            turns=self._records,
            outages=chaos.outages if chaos else [],
            kv_cache_usage=usage,
            plan=plan_rows(scripts),
        )

    def say(self, line: str) -> None:
        """One line of progress."""
        self._progress.print(f"{time.monotonic() - self._started_s:5.0f} s  {line}", markup=False)

    def _chaos(self) -> Chaos | None:
        if self.cluster is None or not self.options.chaos:
            return None
        kills = plan_kills(self.options.seed, self.options.turns, self.cluster.members())
        return Chaos(self.cluster, kills, self.say)

    async def _play_all(
        self, client: Client, served: Served, scripts: list[Script], chaos: Chaos | None
    ) -> None:
        tasks = [asyncio.create_task(self._play(client, served, scripts, chaos))]
        tasks += [asyncio.create_task(chaos.work())] if chaos else []
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _play(self, client: Client, served: Served, scripts: list[Script], chaos: Chaos | None) -> None:
        waiting = list(reversed(scripts))
        planned = sum(len(script.turns) for script in scripts)
        run = uuid4().hex[:8]

        async def worker() -> None:
            while waiting:
                script = waiting.pop()
                naming = Naming(served.model, f"verify-{run}-{script.number}", self.options.ttl_pause_s)
                await self._play_one(
                    self._player(client, served, naming, script.number, chaos), script, planned
                )

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.options.concurrency):
                    group.create_task(worker())
        finally:
            if chaos:
                chaos.finish()

    def _player(
        self, client: Client, served: Served, naming: Naming, number: int, chaos: Outages | None
    ) -> Player:
        return Player(
            client, number, naming, self.options.margin, served.features.token_ids, chaos or Quiet()
        )

    async def _play_one(self, player: Player, script: Script, planned: int) -> None:
        records: list[TurnRecord] = []
        async for record in player.play(script.turns):
            records.append(record)
            self._records.append(record)
            self.say(report.turn_line(len(self._records), planned, record))
            if record.verdict in _BAD:
                for line in report.finding_lines(script, records, self.options):
                    self.say(line)
        if left := len(script.turns) - len(records):
            self.say(f"conversation {script.number}: {left} turns left out, an answer is missing")

    async def _final_usage(self, client: Client) -> dict[str, float | None]:
        """Wait a moment for every block to be given back."""
        deadline_s = time.monotonic() + self.empty_within_s
        if self.engines:
            self.say(f"waiting up to {self.empty_within_s:.0f} s for every KV block to be given back")
        while True:
            usage = {url: await client.kv_cache_usage(url.rstrip("/")) for url in self.engines}
            if not any(usage.values()) or time.monotonic() > deadline_s:
                return usage
            await asyncio.sleep(_POLL_S)

    def _tell_features(self, features: Features) -> None:
        missing = {
            "a named tool_choice: tool calls": features.tools,
            "system messages: they": features.system,
            "the completions API: its turns": features.completions,
        }
        for what, works in missing.items():
            if not works:
                self.say(f"the model does not take {what} are left out")
        if not features.token_ids:
            self.say("the engines return no token ids: texts are compared")


def run(options: VerifyOptions) -> int:
    """Run it, print it, write its file; 0 if everything is right.

    Raises:
        LaunchError: There is no cluster to verify.
    """
    options.check()
    if options.base_url is not None:
        result = asyncio.run(Verification(options, options.base_url, options.engines).run())
    else:
        result = _run_on_own_cluster(options)
    console = result_console()
    report.print_result(console, result)
    if options.json is not None:
        report.write_json(options.json, result)
        console.print(f"everything: {options.json}", markup=False)
    return 0 if result.is_good else 1


def _run_on_own_cluster(options: VerifyOptions) -> Result:
    progress = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(line: str) -> None:
        progress.print(line, markup=False)

    spec = ClusterSpec(
        options.model or prepare_smollm2(progress=say),
        prefill=options.prefill,
        decode=options.decode,
        prefill_prefix_caching=options.prefix_caching,
        engine_args=options.engine_args,
    )
    with Cluster(spec, progress=say) as cluster:
        say(f"logs in {cluster.log_dir}")
        engines = (*cluster.prefill_urls, *cluster.decode_urls)
        empty_within_s = _EMPTY_AFTER_CHAOS_S if options.chaos else _EMPTY_WITHIN_S
        return asyncio.run(Verification(options, cluster.base_url, engines, cluster, empty_within_s).run())
