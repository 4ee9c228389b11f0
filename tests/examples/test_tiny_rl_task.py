"""Right answers of both kinds earn the reward, and no other response does."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.tiny_rl.task import (
    CHARACTERS,
    END_OF_SEQUENCE,
    MAX_RESPONSE_TOKENS,
    PAD,
    Problem,
    decode,
    draw_problem,
    encode,
    reward,
)

problems = st.lists(st.integers(0, 9), min_size=6, max_size=9).map(lambda digits: Problem(tuple(digits)))


def finished(text: str) -> list[int]:
    return [*encode(text), END_OF_SEQUENCE]


@given(problem=problems)
def test_both_forms_of_a_correct_answer_earn_the_reward_within_the_length_cap(problem: Problem) -> None:
    for text in (problem.direct_answer(), problem.worked_answer()):
        assert reward(problem, finished(text)) == 1.0
        assert len(finished(text)) <= MAX_RESPONSE_TOKENS


@given(problem=problems, error=st.integers(-9, 9).filter(bool))
def test_wrong_sum_earns_no_reward(problem: Problem, error: int) -> None:
    assert reward(problem, finished(f">{abs(problem.answer + error)}")) == float(
        problem.answer + error == -problem.answer
    )


@given(problem=problems)
def test_truncated_padded_or_repeated_answer_earns_no_reward(problem: Problem) -> None:
    direct = encode(problem.direct_answer())
    assert reward(problem, direct) == 0.0
    assert reward(problem, [*direct, PAD, END_OF_SEQUENCE]) == 0.0
    assert reward(problem, finished(problem.direct_answer() * 2)) == 0.0
    assert reward(problem, [END_OF_SEQUENCE]) == 0.0
    assert reward(problem, []) == 0.0


@given(text=st.text(alphabet=CHARACTERS))
def test_decode_inverts_encode(text: str) -> None:
    assert decode(encode(text)) == text


def test_a_character_outside_the_alphabet_is_refused() -> None:
    with pytest.raises(KeyError):
        encode("1+x=")


def test_the_same_seed_draws_the_same_problems() -> None:
    drawn = [[draw_problem(random.Random(7)) for _ in range(5)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert np.mean([draw_problem(random.Random(seed)).answer for seed in range(500)]) == pytest.approx(33.75, abs=2.0)
