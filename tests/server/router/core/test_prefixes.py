"""What is foreseen of a prompt, from what was seen of its beginnings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.router.core.digests import chain
from bidikv_server.router.core.ids import EngineUrl, Scope
from bidikv_server.router.core.paths import COMPLETIONS_PATH, RESPONSES_PATH
from bidikv_server.router.core.prefixes import PrefixMemory

P, Q = EngineUrl("http://p"), EngineUrl("http://q")


def prompt(*contents, tenant="t"):
    """Users and assistants in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]
    return chain({"messages": messages}, Scope(tenant, "m"))


def memory(**bounds):
    return PrefixMemory(**{"max_prefixes": 100, **bounds})


def test_nothing_is_known_at_first():
    """Without any prompt there is nothing to measure by; a prompt without a shape never has a measure."""
    assert memory().foresee(prompt("a"), 0.0) is None
    known = memory()
    known.note(prompt("a"), P, 10, 0.0)
    assert known.foresee(chain({"prompt": 3}, Scope("t", "m")), 0.0) is None


def test_the_next_turn():
    """What the engine computed before is cached there; new is what follows the answer."""
    known = memory()
    known.note(prompt("x" * 400), P, 100, 1.0)
    found = known.foresee(prompt("x" * 400, "answer" * 50, "y" * 400), 3.0, turn_steps=1)
    assert (found.cached, found.idle_s) == ({P: 100}, 2.0)
    assert found.tokens == pytest.approx(100 + 75 + 100, abs=20)
    assert found.new_tokens == pytest.approx(100, abs=10)
    known.ended(prompt("x" * 400), 2.5)
    assert known.foresee(prompt("x" * 400, "answer", "y"), 3.0, turn_steps=1).idle_s == 0.5


def test_what_is_new_after_an_edit():
    """What follows the turn that the request still extends, however much more of its beginning prefill has seen."""
    known = memory()
    known.note(prompt("x" * 400), P, 100, 0.0)
    known.note(prompt("x" * 400, "answer" * 50, "y" * 400), P, 275, 0.0)
    edited = known.foresee(prompt("x" * 400, "answer" * 50, "z" * 4000), 0.0, turn_steps=1)
    assert edited.new_tokens == pytest.approx(1000, abs=100)
    repeated = known.foresee(prompt("x" * 400, "answer" * 50, "y" * 400), 0.0, turn_steps=3)
    assert (repeated.tokens, repeated.new_tokens) == (275, 0)


def test_a_turn_without_its_answer():
    """Another question in the place of the answer is new: decode holds what it generated."""
    known = memory()
    known.note(prompt("x" * 400), P, 100, 0.0)
    messages = [{"role": "user", "content": text} for text in ("x" * 400, "y" * 4000)]
    found = known.foresee(chain({"messages": messages}, Scope("t", "m")), 0.0, turn_steps=1)
    assert found.new_tokens == pytest.approx(1000, abs=60)


def test_an_answer_in_several_items():
    """Calls of tools and a message that the model wrote in one turn are one answer."""
    asked = {"role": "user", "content": "x" * 400}
    calls = [
        {"type": "function_call", "name": "f", "call_id": str(n), "arguments": "a" * 400} for n in range(3)
    ]
    output = {"type": "function_call_output", "call_id": "0", "output": "y" * 400}
    first, second = (
        chain({"input": items}, Scope("t", "m"), RESPONSES_PATH)
        for items in ([asked], [asked, *calls, output])
    )
    known = memory()
    known.note(first, P, 100, 0.0)
    assert known.foresee(second, 0.0, turn_steps=1).new_tokens == pytest.approx(110, abs=20)


def test_chunks_are_nobodys():
    """A completion's prompt does not say where the answer ends: all that follows the turn's chunks counts."""
    ids = list(range(100, 100 + 64 * 4))
    first, second = (chain({"prompt": ids[:end]}, Scope("t", "m"), COMPLETIONS_PATH) for end in (64, 256))
    known = memory()
    known.note(first, P, 64, 0.0)
    assert known.foresee(second, 0.0, turn_steps=1).new_tokens == pytest.approx(192, abs=20)


def test_tools_do_not_count_as_text():
    """They stand in front of every prompt; what a conversation grows by tells what a text takes."""
    known = memory()
    known.note(prompt("x" * 400), P, 10_100, 0.0)
    known.note(prompt("x" * 400, "answer" * 50, "y" * 400), P, 10_275, 0.0)
    onward = prompt("x" * 400, "answer" * 50, "y" * 400, "answer" * 50, "z" * 400)
    found = known.foresee(onward, 0.0, turn_steps=3)
    assert found.new_tokens == pytest.approx(100, abs=15)
    assert found.tokens == pytest.approx(10_275 + 175, abs=30)
    assert known.foresee(prompt("x" * 400, "answer" * 50, "w"), 0.0, turn_steps=1).cached[P] == pytest.approx(
        10_175, abs=20
    )


def test_a_count_stands():
    """What an engine counted is not written over by what was foreseen or lies between."""
    known = memory()
    known.note(prompt("x" * 400), P, 100, 0.0)
    known.note(prompt("x" * 400, "answer", "y"), Q, 10_000, 0.0)
    known.note(prompt("x" * 400), None, 900, 0.0, counted=False)
    assert known.foresee(prompt("x" * 400), 0.0).tokens == 100


def test_a_shared_beginning():
    """A conversation that begins like another one is foreseen where that one's beginning was computed."""
    known = memory()
    known.note(prompt("system" * 100, "one"), P, 160, 0.0)
    found = known.foresee(prompt("system" * 100, "another"), 0.0)
    assert found.cached[P] == pytest.approx(150, abs=15)
    assert known.foresee(prompt("system" * 100, "one", tenant="u"), 0.0).cached == {}


def test_several_engines():
    """Engines with the longest known beginning are told, each with what it has."""
    known = memory()
    known.note(prompt("a" * 100), Q, 30, 0.0)
    known.note(prompt("a" * 100), P, 30, 0.0)
    assert set(known.foresee(prompt("a" * 100, "b"), 0.0).cached) == {P, Q}
    known.note(prompt("a" * 100, "b"), P, 32, 1.0)
    assert set(known.foresee(prompt("a" * 100, "b", "c"), 1.0).cached) == {P}


def test_an_engine_that_was_restarted():
    """It has cached nothing from before, and what it computes from then on."""
    known = memory()
    known.note(prompt("a"), P, 10, 0.0)
    known.forget(P, 1.0)
    assert known.foresee(prompt("a"), 1.0).cached == {}
    known.note(prompt("a"), P, 10, 2.0)
    assert known.foresee(prompt("a"), 2.0).cached == {P: 10}


def test_an_engine_that_keeps_less():
    """What an engine found of what was foreseen corrects the next forecast, down to one without a cache, and up again."""
    known = memory()
    known.note(prompt("a" * 100), P, 1000, 0.0)
    for _ in range(30):
        known.found(P, known.foresee(prompt("a" * 100), 0.0).cached[P], 0)
    assert known.foresee(prompt("a" * 100), 0.0).cached[P] == 10
    for _ in range(30):
        known.found(P, known.foresee(prompt("a" * 100), 0.0).cached[P], 1000)
    assert known.foresee(prompt("a" * 100), 0.0).cached[P] == pytest.approx(1000, abs=2)


def test_decode_alone_leaves_no_prefill_engine():
    """Its prompt is known to be so long, and nowhere cached."""
    known = memory()
    known.note(prompt("a" * 100), None, 30, 0.0)
    found = known.foresee(prompt("a" * 100), 5.0, turn_steps=1)
    assert (found.tokens, found.new_tokens, found.cached, found.idle_s) == (30, 0, {}, 5.0)


@given(st.lists(st.tuples(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), st.integers(0, 1000))))
def test_it_is_bounded_and_never_negative(turns):
    """Whatever is noted, no more is remembered than may be, and no count falls below zero or above the prompt."""
    known = memory(max_prefixes=4)
    for number, (contents, tokens) in enumerate(turns):
        known.note(prompt(*contents), P, tokens, float(number))
        assert len(known) <= 4
        found = known.foresee(prompt(*contents, "d", "e"), float(number), turn_steps=number % 3)
        assert 0 <= found.new_tokens <= found.tokens
        assert all(0 <= cached <= found.tokens for cached in found.cached.values())
