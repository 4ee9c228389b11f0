"""Right answers of both kinds earn the reward, and no other response does."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from examples.tiny_rl.task import (
    CHARACTERS,
    END_OF_SEQUENCE,
    MAX_RESPONSE_TOKENS,
    PAD,
    Problem,
    decode,
    encode,
    reward,
)
from examples.tiny_rl.tokenizer import TOKENIZER, write_tokenizer
from foreshock_service.present.pages.tokenizers import announced_names, configured_vocabulary, texts_of

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


def test_text_of_each_token_is_the_tasks(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    write_tokenizer(tmp_path)  # a second start of the demo
    names = announced_names([{"tokenizer": TOKENIZER}], "another model")
    ids = encode(CHARACTERS)
    vocabulary = configured_vocabulary(str(tmp_path), names)
    assert vocabulary is not None
    texts = texts_of(vocabulary, [*ids, PAD, END_OF_SEQUENCE])
    assert "".join(texts[token_id] for token_id in ids) == decode(ids) == CHARACTERS
    assert texts[PAD] == "<pad>"
    assert texts[END_OF_SEQUENCE] == "<end>"
