"""One plain sentence for each outcome of a turn: why it reused no more, and what to change."""

from __future__ import annotations

from typing import Final

from bidikv_server.reasons import Reason

_ADVICE: Final = {
    Reason.HIT: "Everything that decode held and the prompt extends was read back; there is nothing to change.",
    Reason.HIT_DIVERGED: "The history changed{at}, so only what precedes the change was read back: append to the"
    " history instead of rewriting it, and send past answers back as they came.",
    Reason.HIT_EVICTED: "Decode had given some of the later blocks to running requests or let them expire: give it"
    " more KV blocks, or say with `ret` in x-bidikv-turn when the next turn comes.",
    Reason.LOCAL: "Prefill's own prefix cache covered all that a transfer could have brought; there is nothing to"
    " change.",
    Reason.NEW_CONVERSATION: "No known turn belongs to this conversation: if it should, send the same X-Session-ID"
    " with every turn, and the same API key, model and cache_salt.",
    Reason.READBACK_OFF: "Readback is switched off: drop `x-bidikv-readback: off` from the request, or set"
    " `readback = true` in the router's settings.",
    Reason.NO_PREFILL: "No prefill engine took the prompt, so decode computed it alone: see GET /health and the"
    " prefill engines' logs, and undrain or add one.",
    Reason.DECODE_CHEAPER: "Decode held nearly all of the prompt and computed the rest itself, which was the faster way;"
    " there is nothing to change.",
    Reason.RECOMPUTE_CHEAPER: "Prefill computes this prompt faster than it would read it back, by what was measured"
    " lately; there is nothing to change.",
    Reason.NO_INDEX: "The decode engine publishes no retention index: start it with `bidikv engine decode`, and let"
    " the router reach its /metrics.",
    Reason.DECODE_CHANGED: "The engine that held this conversation is down or was restarted, and what it held is"
    " gone: drain an engine before you stop it.",
    Reason.PREVIOUS_RESPONSE: "The request names an earlier response instead of repeating the history, so the decode"
    " engine that keeps it ran the turn alone, on its own prefix cache: send the history as `input` to use prefill.",
    Reason.BELOW_THRESHOLD: "A transfer would have saved too few tokens to pay: lower --recompute-threshold on"
    " prefill if that is wrong.",
    Reason.DIVERGED: "The prompt differs from what decode held{at}, so nothing is provably equal: keep the start of"
    " the prompt (system message, tools, template options) the same in every turn.",
    Reason.EXPIRED: "The next turn came after decode had let the last one expire: raise --retention-ttl on decode"
    " and `max_ttl_s` here, or send a longer `ret` in x-bidikv-turn.",
    Reason.EVICTED: "Decode had given the blocks to running requests: give it more KV blocks or more engines, or say"
    " with `ret` in x-bidikv-turn when the next turn comes.",
    Reason.RELEASED: "The conversation had been declared ended, by `final` in x-bidikv-turn or by a release: send"
    " `final` with the last turn only.",
    Reason.NOT_RETAINED: "Decode retained no turn of this conversation: its last turn may have asked to keep nothing"
    " (`ret=0`, an auxiliary turn), or did not end well.",
    Reason.LOOKUP_TIMEOUT: "Decode's index did not answer prefill in time: check the network to the index port and"
    " that all engines share one BIDIKV_SECRET.",
    Reason.LOOKUP_FAILED: "Prefill could not ask decode's index: check the address it publishes, and prefill's log.",
    Reason.INCOMPATIBLE: "The engines differ in model, block size, cache layout or version: start them alike; their"
    " logs name the difference.",
    Reason.UNSUPPORTED: "This request or model cannot be verified block by block (several choices, prompt embeddings,"
    " media named by the client, sliding-window layers): send one choice, and media by content.",
    Reason.VALIDATION_FAILED: "Decode gave a block away while it was read, and the prompt was recomputed: give decode"
    " more KV blocks if that is frequent.",
    Reason.TRANSFER_FAILED: "A transfer between the engines failed, and the prompt was recomputed: check the network"
    " between them and their logs for NIXL.",
    Reason.NO_ACCOUNT: "The transfer system that the router's setting `transfer` names tells nothing of reuse: only"
    " bidikv's own connector does.",
    Reason.UNKNOWN: "Prefill gave no account of its reuse: start it with `bidikv engine prefill`.",
}


def advise(reason: Reason, diverged_at_token: int | None = None) -> str:
    """Why a turn with this outcome reused no more, and what to change, in one sentence."""
    at = f" at prompt token {diverged_at_token:,}" if diverged_at_token is not None else ""
    return _ADVICE[reason].replace("{at}", at)
