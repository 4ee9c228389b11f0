"""Responses that are cut where prompt and response reach one total, and those that a cap cuts."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from foreshock.lint import LintEvidence, LintReport, collect_evidence, lint_batch, run_checks
from foreshock.rollouts import RolloutBatch


def rollouts(seed: int, *, context: int = 10_000, cap: int = 64, prompts: tuple[int, int] = (6, 38)) -> RolloutBatch:
    """Return 160 rollouts of 40 prompts that end by themselves, at a cap or at a context limit, whichever is first."""
    random = np.random.default_rng(seed)
    of_prompts = np.repeat(random.integers(*prompts, 40, endpoint=True), 4)
    wanted = random.geometric(1 / 20, 160)
    lengths = np.minimum(wanted, np.maximum(np.minimum(cap, context - of_prompts), 1))
    return RolloutBatch.from_lists(
        [str(row) for row in range(160)],
        [[2] * length for length in of_prompts.tolist()],
        [random.integers(3, 90, length).tolist() for length in lengths.tolist()],
        finish_reasons=["length" if each else "stop" for each in (lengths < wanted).tolist()],
    )


def titles(report: LintReport) -> list[str]:
    return [each.title for each in report.warnings if each.name == "context_limit"]


@pytest.mark.parametrize("seed", range(5))
def test_context_limit_is_named_with_its_total(seed: int) -> None:
    batch = rollouts(seed, context=44)
    report = lint_batch(batch)
    assert titles(report) == ["cut responses all end at prompt + response = 44"]
    (found,) = (each for each in report.warnings if each.name == "context_limit")
    assert found.evidence["cut"] == (np.array(batch.finish_reasons) == "length").sum()
    assert "not a cap on responses" in found.seen
    parts = [collect_evidence(batch.select(np.arange(part, 160, 3))) for part in range(3)]
    assert titles(run_checks(reduce(LintEvidence.merge, parts))) == titles(report)


@pytest.mark.parametrize("seed", range(5))
def test_limit_beside_a_cap_is_named_with_its_part(seed: int) -> None:
    (title,) = titles(lint_batch(rollouts(seed, context=44, cap=20)))
    assert " of " in title
    assert title.endswith(" cut responses end at prompt + response = 44")


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("prompts", [(6, 38), (30, 32), (10, 10)])
def test_cap_on_responses_is_no_context_limit(seed: int, prompts: tuple[int, int]) -> None:
    assert not titles(lint_batch(rollouts(seed, cap=16, prompts=prompts)))


@pytest.mark.parametrize("seed", range(5))
def test_prompts_of_one_length_do_not_tell_a_limit_from_a_cap(seed: int) -> None:
    assert not titles(lint_batch(rollouts(seed, context=40, prompts=(20, 20))))


def test_few_cut_responses_are_no_finding() -> None:
    assert not titles(lint_batch(rollouts(1, context=140, cap=1000)))
