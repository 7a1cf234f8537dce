"""What an engine tells of itself among its metrics."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.router.core.engine_notes import EngineNotes, read_notes

PAGE = """\
# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } b"} 3.0
vllm:num_requests_running{engine="1",model_name="a } b"} 4.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:num_requests_waiting_by_reason{engine="0"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:cache_config_info{block_size="32",enable_prefix_caching="True",engine="0"} 1.0
bidikv:retained_tokens{class="soft",engine="0"} 1000.0
bidikv:retained_tokens{class="protected",engine="0"} 24.0
"""


def test_a_page():
    """Sums over ranks and classes, and the fullest rank's usage."""
    assert read_notes(PAGE) == EngineNotes(7, 1, 0.5, 1024, 24, True)


def test_a_stock_engine():
    """What it does not publish is not known."""
    assert read_notes("vllm:num_requests_running 2.0\n") == EngineNotes(running=2)
    assert read_notes("") == EngineNotes()


def test_no_prefix_cache():
    """An engine says whether it has one; one rank without is an engine without."""
    line = 'vllm:cache_config_info{{cache_dtype="auto",enable_prefix_caching="{}"}} 1.0\n'
    assert read_notes(line.format("True") + line.format("False")).prefix_caching is False
    assert read_notes(line.format("None")).prefix_caching is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "x", "0x10", ""])
def test_unreadable_values(value):
    """They are passed over."""
    assert read_notes(f"vllm:num_requests_running {value}\nvllm:num_requests_waiting 1\n") == EngineNotes(
        waiting=1
    )


@given(st.text())
def test_never_fails(text):
    """Whatever an engine writes."""
    read_notes(text + "vllm:kv_cache_usage_perc{" + text)
