"""A mode policy that weighs no seconds, for tests of what each mode does: `mode_policy = "tests.engines.modes:by_length"`."""

from bidikv_server.router.core.choices import Mode, ModeReason

FEW_TOKENS = 256


def by_length(view):
    """A turn with few new tokens runs on decode alone, any other one is read back."""
    few = view.new_tokens is not None and view.new_tokens <= FEW_TOKENS
    return (Mode.ALONE if few else Mode.READBACK), ModeReason.FIXED
