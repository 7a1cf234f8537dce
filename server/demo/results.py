"""What the demo measured, as it is written to JSON, and the sums over it. Pure."""

from __future__ import annotations

from statistics import median

from pydantic import BaseModel, ConfigDict


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Turn(_Model):
    """One turn, played with readback on and off. Counts are prompt tokens of the run with readback on."""

    history: int
    """Nominal prompt tokens of the conversation's first turn."""
    turn: int
    """From 0; turn 0 has nothing to reuse from decode."""
    prompt_tokens: int
    reused_remote_tokens: int
    """Pulled from decode."""
    reused_local_tokens: int
    """Found in prefill's own prefix cache."""
    reused_generated_tokens: int
    """Of the reused ones, those that decode generated in the previous turn."""
    computed_tokens: int
    reason: str
    ttft_on_s: float
    ttft_off_s: float
    reused_local_tokens_off: int
    identical: bool
    answer: str

    @property
    def ratio(self) -> float:
        """How many times sooner the first token came with readback."""
        return self.ttft_off_s / self.ttft_on_s


class Summary(_Model):
    """Medians over the warm turns (all but the first) of one history size."""

    history: int
    ttft_on_s: float
    ttft_off_s: float
    ratio: float
    smallest_ratio: float


class Setting(_Model):
    """All conversations under one setting of prefill's own prefix cache."""

    prefill_prefix_caching: bool
    answers_identical: bool
    turns: list[Turn]
    warm: list[Summary]
    on_growth: float | None
    """Warm TTFT with readback at the largest history over that at the smallest: 1 is flat."""
    off_growth: float | None


class Result(_Model):
    """The whole run."""

    bidikv: str
    vllm: str
    model: str
    cores: int
    quick: bool
    seconds: float
    answers_identical: bool
    settings: list[Setting]


def summarise(*, prefill_prefix_caching: bool, turns: list[Turn]) -> Setting:
    """Sum up one setting's turns."""
    warm = [_summary(history, turns) for history in sorted({turn.history for turn in turns})]
    spread = len(warm) > 1
    return Setting(
        prefill_prefix_caching=prefill_prefix_caching,
        answers_identical=all(turn.identical for turn in turns),
        turns=turns,
        warm=warm,
        on_growth=warm[-1].ttft_on_s / warm[0].ttft_on_s if spread else None,
        off_growth=warm[-1].ttft_off_s / warm[0].ttft_off_s if spread else None,
    )


def _summary(history: int, turns: list[Turn]) -> Summary:
    warm = [turn for turn in turns if turn.history == history and turn.turn > 0]
    return Summary(
        history=history,
        ttft_on_s=median(turn.ttft_on_s for turn in warm),
        ttft_off_s=median(turn.ttft_off_s for turn in warm),
        ratio=median(turn.ratio for turn in warm),
        smallest_ratio=min(turn.ratio for turn in warm),
    )
