"""What `bidikv verify` is asked to do."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bidikv_server.launch.errors import LaunchError

if TYPE_CHECKING:
    from pathlib import Path


class UsageError(LaunchError):
    """The options, or what they point to, cannot be used; the message says what to change."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """One run.

    Attributes:
        base_url: A running router; None starts a cluster for this run.
        engines: Base URLs of its engines, whose KV cache has to be empty in the end.
        api_key: Sent as a bearer token.
        turns: How many turns to play, over all conversations.
        seed: Decides every operation and every text.
        concurrency: Conversations played at once.
        conversation: Play only this one of the plan.
        json: Where to write everything.
        timeout_s: A request that takes longer hangs.
        margin: Log-probability difference below which two tokens are a near tie.
        ttl_pause_s: How long a pause past the TTL really waits; 0 relies on a TTL of a millisecond.
        chaos: Kill and restart members of the cluster meanwhile.
        prefill: Prefill engines of the cluster that is started.
        decode: Decode engines of the cluster that is started.
        prefix_caching: Prefill's own prefix cache in the cluster that is started.
        model: Checkpoint folder for the cluster that is started; None takes the packaged SmolLM2-135M.
        engine_args: Passed to the vLLM of the cluster that is started.
    """

    base_url: str | None = None
    engines: tuple[str, ...] = ()
    api_key: str | None = None
    turns: int = 50
    seed: int = 0
    concurrency: int = 2
    conversation: int | None = None
    json: Path | None = None
    timeout_s: float = 120.0
    margin: float = 0.05
    ttl_pause_s: float = 0.0
    chaos: bool = False
    prefill: int = 1
    decode: int = 1
    prefix_caching: bool = False
    model: Path | None = None
    engine_args: tuple[str, ...] = ()

    def check(self) -> None:
        """Do nothing if the options go together.

        Raises:
            UsageError: They do not.
        """
        if self.base_url is None and self.engines:
            raise UsageError("--engine goes with --base-url; the engines of a cluster of its own are known.")
        if self.base_url is not None and self.chaos:
            raise UsageError("--chaos kills engines, so it needs a cluster of its own: leave out --base-url.")
        own = VerifyOptions()
        started = ("prefill", "decode", "prefix_caching", "model", "engine_args")
        if self.base_url is not None and any(getattr(self, name) != getattr(own, name) for name in started):
            raise UsageError(
                "--prefill, --decode, --prefix-caching, --model and arguments for vLLM are for a cluster that "
                "this command starts: leave them out, or leave out --base-url."
            )

    def replay(self, conversation: int | None = None) -> str:
        """The command that plays the same again, or one conversation of it. The API key is not in it."""
        words = ["bidikv", "verify"]
        words += ["--base-url", self.base_url] if self.base_url else []
        words += [word for url in self.engines for word in ("--engine", url)]
        words += [
            "--turns",
            str(self.turns),
            "--seed",
            str(self.seed),
            "--concurrency",
            str(self.concurrency),
        ]
        words += ["--ttl-pause", f"{self.ttl_pause_s:g}"] if self.ttl_pause_s else []
        words += ["--chaos"] if self.chaos else []
        words += ["--prefill", str(self.prefill)] if self.prefill > 1 else []
        words += ["--decode", str(self.decode)] if self.decode > 1 else []
        words += ["--prefix-caching"] if self.prefix_caching else []
        words += ["--model", str(self.model)] if self.model else []
        one = self.conversation if conversation is None else conversation
        words += [] if one is None else ["--conversation", str(one)]
        words += ["--", *self.engine_args] if self.engine_args else []
        return shlex.join(words)
