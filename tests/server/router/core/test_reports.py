"""A turn's report as plain values."""

from bidikv.headers import ReuseHeader
from bidikv_server.reasons import Reason
from bidikv_server.router.core.engines import Role
from bidikv_server.router.core.policy import Placement
from bidikv_server.router.core.reports import LegReport, TurnReport, fields, readable_model


def test_what_is_not_known_is_left_out():
    """A turn that was refused at the door has little to tell."""
    told = fields(TurnReport("r", "/v1/completions", "invalid_api_key", 401, 0.00012345, 0.0))
    assert told == {
        "request_id": "r", "path": "/v1/completions", "outcome": "invalid_api_key", "status": 401,
        "queued_s": 0.0, "seconds": 0.000123, "legs": [],
    }  # fmt: skip


def test_everything():
    """Plain strings and numbers only, so that any encoder takes them."""
    told = fields(
        TurnReport(
            "r", "/v1/completions", "ok", 200, 1.0, 0.5,
            conversation="c", tenant="t", model="m", identity="none",
            reuse=ReuseHeader(Reason.HIT, 9, 4, 3, 2, None),
            placement=Placement.HOME, prefill="http://p", decode="http://d", ttft_s=0.25,
            legs=(LegReport(Role.PREFILL, "http://p", "ok", 0.1),), output_tokens=7, trace_id="a" * 32,
        )
    )  # fmt: skip
    assert told["legs"] == [{"leg": "prefill", "engine": "http://p", "outcome": "ok", "seconds": 0.1}]
    assert {type(value) for value in told.values()} == {str, int, float, list}
    assert (told["reason"], told["placement"], told["remote_tokens"]) == ("hit", "home", 4)
    assert "diverged_at_token" not in told


def test_readable_model():
    """A client's name fits on one line of a bounded length."""
    assert readable_model("org/model-1") == "org/model-1"
    assert (
        readable_model("a\nb\x1b[0m\u202e")
        == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}[0m\N{REPLACEMENT CHARACTER}"
    )
    assert len(readable_model("m" * 10_000)) == 128
