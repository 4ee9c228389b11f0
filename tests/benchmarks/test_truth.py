"""The judgement of the truth bench: false causes, causes that are not named, and faulty runs called healthy."""

from __future__ import annotations

import pytest

from benchmarks.truth.bench import Bench
from benchmarks.truth.case import Case, Outcome, Sentence, judge

HEAD = Sentence("wrong-weights", "The engine ran with the lm_head of step 1.", names_cause=True)
NUMERICS = Sentence("cause", "Most of it is numerics between engine and trainer.", names_cause=True)
UNSURE = Sentence("cannot-tell", "Cannot tell the weights from numerics with 16 rollouts.", names_cause=False)


def not_run(bench: Bench) -> Outcome:
    raise NotImplementedError


def case(expected: str | None, *, sufficient: bool = True, also_true: tuple[str, ...] = ()) -> Case:
    return Case("a case", expected, sufficient, not_run, also_true, not_healthy=True)


@pytest.mark.parametrize(
    ("expected", "sufficient", "shown", "verdict", "is_true"),
    [
        ("lm_head of step 1", True, (HEAD,), "warning", True),
        ("wrong-weights", True, (HEAD, UNSURE), "warning", True),
        ("wrong-weights", True, (HEAD, NUMERICS), "warning", False),
        ("wrong-weights", True, (UNSURE,), "warning", False),
        ("wrong-weights", True, (), "warning", False),
        ("wrong-weights", False, (UNSURE,), "warning", True),
        ("wrong-weights", False, (NUMERICS,), "warning", False),
        ("wrong-weights", True, (HEAD,), "healthy", False),
        (None, True, (UNSURE,), "warning", True),
        (None, True, (NUMERICS,), "warning", False),
    ],
)
def test_case_is_true_only_if_the_true_cause_and_no_other_is_named(
    expected: str | None, sufficient: bool, shown: tuple[Sentence, ...], verdict: str, is_true: bool
) -> None:
    assert judge(case(expected, sufficient=sufficient), Outcome(shown, verdict)).true is is_true


def test_consequences_that_are_true_may_be_named_too() -> None:
    outcome = Outcome((HEAD, NUMERICS), "warning")
    assert judge(case("wrong-weights", also_true=("cause",)), outcome).true
    assert judge(case("wrong-weights"), outcome).shown == NUMERICS.text
