"""Where prompts are computed, policy by policy."""

from bidikv_server.router.core.choices import PrefillChoice, PrefillOption
from bidikv_server.router.core.engines import EngineSnapshot, Role
from bidikv_server.router.core.ids import EngineUrl
from bidikv_server.router.core.prefill_policies import cached_prefix, least_loaded


def option(url, *, load=0, backlog=0, **fields):
    engine = EngineSnapshot(
        EngineUrl(url), Role.PREFILL, healthy=True, in_flight=load, backlog_tokens=backlog
    )
    return PrefillOption(engine, **fields)


def chosen(policy, *options):
    found, choice = policy(options)
    return found.engine.url, choice


def test_the_cached_prefix():
    """An engine that has computed the beginning has less to do, until as much as that is ahead there."""
    cold = option("cold", computed_tokens=1000)
    warm = option("warm", cached_tokens=800, computed_tokens=200)
    assert chosen(cached_prefix, cold, warm) == ("warm", PrefillChoice.CACHED_PREFIX)
    busy = option("warm", load=3, backlog=801, cached_tokens=800, computed_tokens=200)
    assert chosen(cached_prefix, cold, busy) == ("cold", PrefillChoice.LEAST_LOADED)


def test_what_decode_holds_is_pulled_at_less():
    """A pulled token counts a quarter while nothing was measured."""
    cold = option("cold", computed_tokens=100, pulled_tokens=800)
    warm = option("warm", backlog=201, cached_tokens=800, computed_tokens=100)
    assert chosen(cached_prefix, cold, warm) == ("cold", PrefillChoice.LEAST_LOADED)


def test_measured_seconds():
    """They decide once every engine has some."""
    slow = option("slow", cached_tokens=900, computed_tokens=100, expected_s=2.0)
    fast = option("fast", computed_tokens=1000, expected_s=1.0)
    assert chosen(cached_prefix, slow, fast) == ("fast", PrefillChoice.LEAST_LOADED)
    new = option("new", computed_tokens=1000)
    assert chosen(cached_prefix, slow, new) == ("slow", PrefillChoice.CACHED_PREFIX)


def test_nothing_known():
    """Without any forecast the fewest requests decide, and then the order of the settings."""
    for policy in (cached_prefix, least_loaded):
        assert chosen(policy, option("p", load=1), option("q"), option("r")) == (
            "q",
            PrefillChoice.LEAST_LOADED,
        )
        assert chosen(policy, option("p", load=9)) == ("p", PrefillChoice.ONLY)
