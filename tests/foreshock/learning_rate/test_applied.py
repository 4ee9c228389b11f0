"""Sentences on what a trainer applied of the advice."""

from __future__ import annotations

import pytest

from foreshock.learning_rate.applied import Applied, effect_in_words

APPLIED = Applied(step=201, learning_rate=5e-7, revision=3, scale=0.5)
RATE_ONLY = Applied(step=201, learning_rate=5e-7, revision=3)


@pytest.mark.parametrize(
    ("mode", "revision", "applied", "words"),
    [
        ("shadow", 3, None, "shown only, the trainer gets 1.0"),
        ("apply", 3, None, "sent to trainers that ask, not acknowledged"),
        ("apply", 3, APPLIED, "applied 0.5 at step 201 (learning rate 5e-07)"),
        ("apply", 3, RATE_ONLY, "applied the learning rate 5e-07 at step 201"),
    ],
)
def test_effect_is_what_was_acknowledged(mode: str, revision: int, applied: Applied | None, words: str) -> None:
    assert effect_in_words(mode, revision, applied) == words


def test_a_newer_revision_is_not_acknowledged() -> None:
    words = effect_in_words("apply", 4, APPLIED)
    assert words.startswith("applied 0.5 at step 201")
    assert words.endswith("of revision 3; revision 4 is sent to trainers that ask, not acknowledged")


def test_a_rate_without_a_scale_is_parsed() -> None:
    answer = {"step": 201, "learning_rate": 5e-7, "revision": 3, "scale": None, "received_at_us": 1}
    assert Applied.from_json(answer) == RATE_ONLY
