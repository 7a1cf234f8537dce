"""What router and connector say to each other inside vLLM's `kv_transfer_params`.

vLLM's own keys keep their spelling. Everything of ours sits under the one key `bidikv`:

prefill leg (router to prefill)   {"v": 1, "conversation": str, "salt": str, "sources": ["host:port", ...]}
    `sources` are the retention indexes to ask, best first; an empty list means: do not ask.
prefill answer (prefill to router) {"v": 1, "reason": str, "prompt_tokens": int, "remote_tokens": int,
                                    "local_tokens": int, "computed_tokens": int, "diverged_at_token": int | None}
decode leg (router to decode)     {"v": 1, "conversation": str, "salt": str, "retain_s": float, "protect": bool,
                                    "release": bool}
    Without it, or with `retain_s` 0, decode retains nothing. `protect`: the client said when it comes back. `release`: no
    turn will follow; forget what the conversation left.
decode's metrics                   bidikv:index_info{engine_id, engine, address="host:port"} 1
    How the router learns the address of an engine's retention index.

`conversation` and `salt` are opaque to the engine: the router derives both from (tenant, model, adapter, cache salt,
session), so text of two tenants never matches. No block id ever passes through the router.
"""

from __future__ import annotations

from typing import Any, Final

KEY: Final = "bidikv"
VERSION: Final = 1
INDEX_INFO_METRIC: Final = "bidikv:index_info"
SECRET_VARIABLE: Final = "BIDIKV_SECRET"  # noqa: S105  (the name of a variable)
"""Environment variable that gives all engines of a deployment the side channel's secret. Argv and the engine's
configuration, which vLLM logs, are no place for it."""


NOTHING_TO_PULL: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""`kv_transfer_params` of a prefill leg to stock vLLM that has no KV to fetch."""


def prefill_leg(
    *, conversation: str, salt: str, sources: list[str], return_token_ids: bool = False
) -> dict[str, Any]:
    """`kv_transfer_params` that ask a prefill engine to compute a prompt for a decode engine.

    Args:
        conversation: Opaque key.
        salt: Per-tenant secret.
        sources: Retention indexes to ask.
        return_token_ids: Put the prompt's token ids into the account (`prompt_token_ids`).
    """
    ours: dict[str, Any] = {"v": VERSION, "conversation": conversation, "salt": salt, "sources": sources}
    if return_token_ids:
        ours["return_token_ids"] = True
    return {**NOTHING_TO_PULL, KEY: ours}


def decode_leg(
    prefill_answer: dict[str, Any],
    *,
    conversation: str,
    salt: str,
    retain_s: float,
    protect: bool = False,
    release: bool = False,
) -> dict[str, Any]:
    """`kv_transfer_params` for the decode leg, built from what prefill answered."""
    ours = {
        "v": VERSION,
        "conversation": conversation,
        "salt": salt,
        "retain_s": retain_s,
        "protect": protect,
        "release": release,
    }
    return {**prefill_answer, KEY: ours}
