"""Why a turn reused what it reused: one code per turn, the same in headers, metrics and logs."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The outcome of one turn's reuse. Anything but HIT* and LOCAL is a recompute, never an error."""

    # Reuse happened.
    HIT = "hit"
    """Prefill pulled all whole blocks that decode retained of this conversation and that the prompt extends."""
    HIT_DIVERGED = "hit_diverged"
    """The history changed; the blocks before the change were pulled."""
    HIT_EVICTED = "hit_evicted"
    """Decode had handed out or let expire the later blocks; the earlier ones were pulled."""
    LOCAL = "local"
    """Prefill's own prefix cache already covered what decode could give."""

    # Decided by the router: no lookup was made.
    NEW_CONVERSATION = "new_conversation"
    READBACK_OFF = "readback_off"
    NO_PREFILL = "no_prefill"
    """No prefill engine could take the prompt; decode computed it alone."""
    DECODE_CHEAPER = "decode_cheaper"
    """Decode held nearly all of the prompt and computed the rest alone: by what was measured, faster than by way of prefill."""
    RECOMPUTE_CHEAPER = "recompute_cheaper"
    """By what was measured, prefill computes the prompt faster than it would pull it."""
    NO_INDEX = "no_index"
    """The decode engine publishes no retention index (a stock engine, or not reached yet)."""
    DECODE_CHANGED = "decode_changed"
    """The engine that held this conversation is gone or was restarted."""
    PREVIOUS_RESPONSE = "previous_response"
    """The request names an earlier response instead of repeating the history: only the decode engine that keeps it knows
    the prompt, and computes it alone."""

    # Decided by prefill's lookup.
    BELOW_THRESHOLD = "below_threshold"
    """Pulling would have saved fewer tokens than `kv_recompute_threshold`."""
    DIVERGED = "diverged"
    """The history changed within the first block: nothing is provably equal."""
    EXPIRED = "expired"
    EVICTED = "evicted"
    """Decode handed the blocks out to running requests."""
    RELEASED = "released"
    """The conversation was declared ended."""
    NOT_RETAINED = "not_retained"
    """Decode knows no turn of this conversation."""
    LOOKUP_TIMEOUT = "lookup_timeout"
    LOOKUP_FAILED = "lookup_failed"
    INCOMPATIBLE = "incompatible"
    """The engines differ in model, block size, cache layout or protocol version."""
    UNSUPPORTED = "unsupported"
    """This request or model cannot be verified block by block (for instance sliding-window layers)."""

    # Found out after the pull: the pulled blocks were dropped and recomputed.
    VALIDATION_FAILED = "validation_failed"
    """A block was handed out on decode while it was being read."""
    TRANSFER_FAILED = "transfer_failed"

    NO_ACCOUNT = "no_account"
    """The transfer system in use tells nothing of reuse."""
    UNKNOWN = "unknown"
    """Prefill returned no account of its reuse."""
