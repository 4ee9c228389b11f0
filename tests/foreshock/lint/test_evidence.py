"""Evidence merges: any split of a batch into shards, merged in any order, gives the same report."""

from __future__ import annotations

import gc
import json
from dataclasses import fields, replace
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.errors import StatisticsError
from foreshock.lint import CHECKS, LintEvidence, collect_evidence, counting, run_checks
from foreshock.lint.checks.duplicates import Repeats
from foreshock.lint.checks.places import _PLACES, SumsByPlace
from foreshock.lint.counting import Table
from foreshock.rollouts import RolloutBatch
from tests.foreshock.batches import random_batch
from tests.foreshock.lint.conftest import recorded_step

# Counted over a sample of tokens, for ids or a large k3 of a shard only, or by the order in a shard; a group once per
# shard; hashes: see below.
SAMPLED = ("RolloutRounding", "TrainerRounding", "Shifts")
DIFFERENT = (
    *SAMPLED,
    "SumsAfterId",
    "SumsByPlace.groups",
    "MissingById.sampled",
    "Hashes",
    "RolloutsByRow",
    "SumsBySize.least",
)


def damaged_batch(seed: int) -> RolloutBatch:
    """Return a batch with masks, NaN, missing log-probs and repeated rollouts."""
    batch = random_batch(seed, rollouts=24, longest=20)
    assert batch.trainer_log_probs is not None
    broken = batch.trainer_log_probs.copy()
    broken[batch.response_token_ids < 40] = 0
    broken[::17] = np.nan
    rows = [*range(24), 1, 3]
    repeated = replace(batch, trainer_log_probs=broken).select(rows)
    return replace(repeated, sample_ids=[f"row-{index:02}" for index in range(len(rows))])


def numbers_of(evidence: LintEvidence) -> dict[str, Any]:
    """Return all numbers that do not depend on the shards, by name."""
    found: dict[str, Any] = {}
    for kind, part in evidence.parts.items():
        for each in fields(part):
            value = getattr(part, each.name)
            if not isinstance(value, Table):
                found[f"{kind.__name__}.{each.name}"] = value
                continue
            name = type(value).__name__
            if isinstance(value, SumsByPlace):
                # Places by length are summed for a large k3 of a shard only.
                value = value.rows(value.keys < 1000 * len(_PLACES))
            found |= {f"{name}.{column}": value.column(column) for column in value.COLUMNS}
            found[f"{name}.keys"] = value.keys
    return {name: value for name, value in found.items() if not name.startswith(DIFFERENT)}


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), order=st.permutations(range(26)), parts=st.integers(1, 6))
def test_any_split_in_any_order_gives_same_evidence(seed: int, order: list[int], parts: int) -> None:
    batch = damaged_batch(seed)
    whole = collect_evidence(batch)
    shards = [batch.select(np.array(rows)) for rows in np.array_split(order, parts)]
    merged = reduce(LintEvidence.merge, [collect_evidence(shard) for shard in shards])
    found, expected = numbers_of(merged), numbers_of(whole)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
    repeats = [each[Repeats].hashes.repeats(0.0)[0] for each in (merged, whole)]
    assert repeats[0] == pytest.approx(repeats[1])
    assert [warning.name for warning in run_checks(merged).warnings] == [
        warning.name for warning in run_checks(whole).warnings
    ]


def test_merge_is_commutative() -> None:
    one, two = collect_evidence(damaged_batch(1)), collect_evidence(damaged_batch(2))
    forward, backward = run_checks(one.merge(two)), run_checks(two.merge(one))
    assert forward == backward
    assert forward.warnings


def test_evidence_round_trips_through_bytes() -> None:
    evidence = collect_evidence(damaged_batch(3))
    again = LintEvidence.from_bytes(evidence.to_bytes(), evidence.examples_to_json())
    assert again.to_bytes() == evidence.to_bytes()
    assert run_checks(again) == run_checks(evidence)
    assert any(warning.where for warning in run_checks(again).warnings)


def test_evidence_of_large_shard_is_small() -> None:
    evidence = collect_evidence(recorded_step(160))
    assert len(evidence.to_bytes()) < 128 * 64 + 2048


@pytest.mark.parametrize("damage", [b"", b"FSST", b"nonsense" * 20])
def test_damaged_evidence_is_an_error(damage: bytes) -> None:
    with pytest.raises(StatisticsError):
        LintEvidence.from_bytes(damage)


def test_examples_hold_only_storable_characters() -> None:
    batch = damaged_batch(4)
    named = replace(batch, sample_ids=[f"a\x00b\ud800{row}" for row in range(batch.num_rollouts)])
    for examples in collect_evidence(named).examples_to_json().values():
        for example in examples:
            assert "\x00" not in example["sample_id"]
            example["sample_id"].encode()


@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_piece_size_does_not_change_evidence(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = damaged_batch(5)
    expected = collect_evidence(batch)
    monkeypatch.setattr(counting, "_PIECE_TOKENS", piece)
    evidence = collect_evidence(batch)
    found, wanted = numbers_of(evidence), numbers_of(expected)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, err_msg=name)
    assert evidence.examples == expected.examples
    assert [(warning.name, warning.seen) for warning in run_checks(evidence).warnings] == [
        (warning.name, warning.seen) for warning in run_checks(expected).warnings
    ]


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


def test_evidence_leaves_nothing_for_the_garbage_collector() -> None:
    """A decoder collects rarely, so that a cycle would keep the columns of many batches."""
    batch = random_batch(1, rollouts=24, longest=20)
    collect_evidence(batch)
    gc.collect()
    gc.disable()
    try:
        collect_evidence(batch)
        assert gc.collect() == 0
    finally:
        gc.enable()
