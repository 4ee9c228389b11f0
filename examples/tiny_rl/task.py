"""The task: add six to nine digits. The reward is computed by arithmetic; there is no reward model.

A prompt reads `4+7+6+3+7+9=`. Two ways of answering are taught by the warm-up: at once (`>36`), or with the running
sums written down first (` 4 11 17 20 27 36>36`). The second is several times longer and right far more often, so
reinforcement learning makes responses longer, as it does in large runs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

PAD = 0
"""Padding in batches. The id is in the vocabulary: if the model samples it, it is an ordinary token."""
END_OF_SEQUENCE = 1
CHARACTERS = "0123456789+= >"
VOCABULARY_SIZE = 2 + len(CHARACTERS)
FEWEST_DIGITS, MOST_DIGITS = 6, 9
MAX_RESPONSE_TOKENS = 48
"""Cap of a response in tokens. The longest correct answer has 29; a response that reaches the cap earns nothing."""

_ID_OF = {character: index + 2 for index, character in enumerate(CHARACTERS)}


@dataclass(frozen=True, slots=True)
class Problem:
    """A sum of single digits."""

    digits: tuple[int, ...]

    @property
    def answer(self) -> int:
        return sum(self.digits)

    @property
    def prompt_token_ids(self) -> list[int]:
        return encode("+".join(map(str, self.digits)) + "=")

    def direct_answer(self) -> str:
        return f">{self.answer}"

    def worked_answer(self) -> str:
        return "".join(f" {partial}" for partial in accumulate(self.digits)) + self.direct_answer()


def draw_problem(
    random_source: random.Random, fewest_digits: int = FEWEST_DIGITS, most_digits: int = MOST_DIGITS
) -> Problem:
    count = random_source.randint(fewest_digits, most_digits)
    return Problem(tuple(random_source.randint(0, 9) for _ in range(count)))


def encode(text: str) -> list[int]:
    """Return the token ids of a text. Raises KeyError for a character outside `CHARACTERS`."""
    return [_ID_OF[character] for character in text]


def decode(token_ids: list[int]) -> str:
    """Return the text of token ids; `_` stands for the pad id, `$` for the end of the sequence."""
    return "".join(("_", "$", *CHARACTERS)[token_id] for token_id in token_ids)


def reward(problem: Problem, response_token_ids: list[int]) -> float:
    """Return 1.0 if the response ends by itself and the sum follows its only `>`, else 0.0."""
    if not response_token_ids or response_token_ids[-1] != END_OF_SEQUENCE:
        return 0.0
    _, mark, answer = decode(response_token_ids[:-1]).partition(">")
    return float(mark == ">" and answer == str(problem.answer))
