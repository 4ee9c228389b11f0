"""For any values in a batch the lint raises no error and no numpy warning, and its report is plain JSON."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.lint import CHECKS, LintEvidence, collect_evidence, run_checks
from foreshock.rollouts import RolloutBatch

FLOATS = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1.0, np.nan, np.inf, -np.inf, -1e-45, -3.4e38, 3.4e38, -1e-5, 1e-5, -0.693]),
)


@st.composite
def strange_batches(draw: st.DrawFn) -> RolloutBatch:
    """Draw a few rollouts, some of them empty, with any floats in any columns."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    tokens, rollouts = sum(lengths), len(lengths)

    def column(size: int) -> np.ndarray | None:
        if not draw(st.booleans()):
            return None
        return np.array(draw(st.lists(FLOATS, min_size=size, max_size=size)), np.float32)

    mask = draw(st.none() | st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens))
    return RolloutBatch.from_arrays(
        [f"row {row}" for row in range(rollouts)],
        draw(st.lists(st.integers(0, 3), min_size=rollouts, max_size=rollouts)),
        np.arange(rollouts + 1),
        np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=tokens, max_size=tokens)), np.int64),
        np.concatenate([[0], np.cumsum(lengths)]),
        check_values=False,
        rollout_log_probs=column(tokens),
        trainer_log_probs=column(tokens),
        entropy=column(tokens),
        advantage=column(tokens),
        advantage_per_token=True,
        response_mask=None if mask is None else np.array(mask, np.uint8),
        temperature=column(rollouts),
        top_p=column(rollouts),
        min_p=column(rollouts),
        group_ids=draw(st.none() | st.just(["same"] * rollouts)),
    )


@settings(max_examples=60)
@given(strange_batches(), strange_batches())
def test_random_values_give_a_valid_report(one: RolloutBatch, two: RolloutBatch) -> None:
    evidence = collect_evidence(one).merge(collect_evidence(two))
    again = LintEvidence.from_bytes(evidence.to_bytes(), evidence.examples_to_json())
    report = run_checks(again)
    assert len(report.checks) == len(CHECKS)
    json.dumps(report.to_dict(), allow_nan=False)
    for warning in report.warnings:
        assert "nan" not in warning.seen.split()
