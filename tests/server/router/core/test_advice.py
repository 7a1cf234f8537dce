"""What the admin API says about an outcome."""

import pytest

from bidikv_server.reasons import Reason
from bidikv_server.router.core.advice import advise


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_its_sentence(reason):
    """One sentence, without a hole, and another one for every reason."""
    sentence = advise(reason)
    assert sentence[0].isupper()
    assert sentence.endswith(".")
    assert ". " not in sentence
    assert "{" not in sentence
    assert sum(advise(other) == sentence for other in Reason) == 1


@pytest.mark.parametrize("reason", [Reason.DIVERGED, Reason.HIT_DIVERGED])
def test_place_of_a_change(reason):
    """A diverged prompt is told where, as far as that is known."""
    assert "at prompt token 4,409," in advise(reason, 4409)
    assert "token" not in advise(reason).partition(",")[0]
