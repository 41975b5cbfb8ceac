"""Warnings come once, name what is at fault, and leave ordinary drafts alone."""

import warnings
from collections.abc import Callable
from typing import cast

from callbacks.alarms import Alarms
from callbacks.methods import Contender
from callbacks.predictions import Prediction
from masw_lightning.drafts.base import DraftPolicy

POLICY = cast(DraftPolicy, object())


def alarms() -> Alarms:
    return Alarms(num_draft_tokens=5, target="big", draft="small", tokenizer="bpe")


def record(iterations: int, accepted: int) -> Prediction:
    counts = [accepted] + [0] * (iterations - 1)
    return Prediction("a", "d", "m", 10, 20, "", iterations, counts, 1.0, 1.0, 1.0, 1.0, 0, 0)


def said(action: Callable[[], None]) -> list[str]:
    """The warnings of an action."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(w.message) for w in caught]


def test_acceptance_near_zero_warns_once_over_several_prompts() -> None:
    watch, contender = alarms(), Contender("masw", POLICY, {}, ratio=4)
    assert said(lambda: watch.after(contender, record(60, 1))) == []
    assert said(lambda: watch.after(contender, record(60, 1))) == [
        "method 'masw': 2 of 600 drafted tokens were accepted in 120 iterations (target big, draft small, tokenizer "
        "bpe, memory ratio 4): check that draft and target belong together and that the draft is trained."
    ]
    assert said(lambda: watch.after(contender, record(60, 1))) == []


def test_ordinary_acceptance_and_the_reference_are_quiet() -> None:
    watch = alarms()
    assert said(lambda: watch.after(Contender("weak", POLICY, {}), record(200, 21))) == []  # just above 2 %
    assert said(lambda: watch.after(Contender("autoregressive", None, {}), record(200, 0))) == []
    assert said(lambda: watch.before(Contender("masw", POLICY, {}, trained_length=1024), 2048)) == []
    assert said(lambda: watch.before(Contender("masw", POLICY, {}, trained_length=None), 10**6)) == []


def test_far_beyond_the_trained_length_warns_once() -> None:
    watch, contender = alarms(), Contender("masw", POLICY, {}, trained_length=1024)
    warned = said(lambda: watch.before(contender, 2049)) + said(lambda: watch.before(contender, 4096))
    assert len(warned) == 1
    assert "trained on texts of 1024 tokens and now reads 2049" in warned[0]
