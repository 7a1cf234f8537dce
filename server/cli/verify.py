"""`bidikv verify`: check on a running cluster that reuse changes no answer."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  (typer reads annotations)
from typing import Annotated

import typer

from bidikv_server.cli.console import launch_errors, require_extra, stop_signals


def verify(
    *,
    base_url: Annotated[
        str | None,
        typer.Option(help="A running router, with or without /v1. Default: start a cluster for this run."),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="Base URL of an engine behind --base-url, whose KV blocks have to be free in the end. Repeatable."
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Bearer token for the router.", envvar="BIDIKV_API_KEY")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns to play, over all conversations.")] = 50,
    seed: Annotated[int, typer.Option(help="Decides every operation and every text.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Conversations played at once.")] = 2,
    conversation: Annotated[
        int | None, typer.Option(min=0, help="Play only this conversation of the plan.", metavar="NUMBER")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the plan and every turn here.", metavar="FILE")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="A request that takes longer hangs, in seconds.", metavar="S")
    ] = 120.0,
    margin: Annotated[
        float, typer.Option(min=0.0, help="Largest difference of log probabilities that is a near tie.")
    ] = 0.05,
    ttl_pause: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="How long a pause past the TTL waits, in seconds. 0 waits not at all and sends a tiny TTL.",
            metavar="S",
        ),
    ] = 0.0,
    chaos: Annotated[
        bool,
        typer.Option("--chaos", help="Kill and restart engines and router meanwhile (own cluster only)."),
    ] = False,
    prefill: Annotated[int, typer.Option(min=1, help="Own cluster: number of prefill engines.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Own cluster: number of decode engines.")] = 1,
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--prefix-caching",
            help="Own cluster: prefill keeps a prefix cache. Without, all reuse is readback.",
        ),
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", help="Own cluster: checkpoint folder. Default: SmolLM2-135M."),
    ] = None,
    vllm_args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="VLLM_ARGS", help="Own cluster: what follows `--`, passed to every engine's vLLM."
        ),
    ] = None,
) -> None:
    """Play random conversations and compare every greedy answer with a cold run on the same engines.

    Answers are compared token by token. Where they part, both requests are sent again with log probabilities: if
    both tokens were almost equally likely, the difference is a near tie, which batching alone can flip. Near ties
    are counted and shown, but only mismatches, hung or failed requests and KV blocks that stay in use end with 1.
    """
    with launch_errors(), stop_signals():
        require_extra("router", "aiohttp", "pydantic")
        from bidikv_server.verify import run_verify  # noqa: PLC0415  (needs an optional extra)
        from bidikv_server.verify.options import VerifyOptions  # noqa: PLC0415

        options = VerifyOptions(
            base_url=base_url,
            engines=tuple(engine or ()),
            api_key=api_key,
            turns=turns,
            seed=seed,
            concurrency=concurrency,
            conversation=conversation,
            json=json,
            timeout_s=timeout,
            margin=margin,
            ttl_pause_s=ttl_pause,
            chaos=chaos,
            prefill=prefill,
            decode=decode,
            prefix_caching=prefix_caching,
            model=model,
            engine_args=tuple(vllm_args or ()),
        )
        raise typer.Exit(run_verify(options))
