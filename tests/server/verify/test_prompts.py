"""Texts for conversations."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.verify import prompts


@given(seed=st.integers(), words=st.integers(1, 400))
def test_a_passage_has_about_the_words_that_were_asked_for(seed, words):
    """To within a sentence, and the same for the same seed."""
    text = prompts.passage(Random(seed), words)
    assert words <= len(text.split()) <= words + 20
    assert text == prompts.passage(Random(seed), words)


@given(seed=st.integers(), words=st.integers(0, 60))
def test_an_edit_changes_the_text(seed, words):
    """Always: an edit that changed nothing would test nothing."""
    text = prompts.user_text(Random(seed), words)
    assert prompts.edited(Random(seed), text) != text


@given(seed=st.integers(), low=st.integers(1, 50), more=st.integers(-10, 1000))
def test_log_uniform_stays_within_its_bounds(seed, low, more):
    """Even if the upper one is below the lower one."""
    assert low <= prompts.log_uniform(Random(seed), low, low + more) <= max(low, low + more)
