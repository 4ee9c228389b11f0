"""Evidence merges: any split of a batch into shards, merged in any order, gives the same report."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.errors import StatisticsError
from foreshock.lint import LintEvidence, collect_evidence, counting, run_checks
from foreshock.lint.counting import COUNTS, SUMS
from foreshock.rollouts import RolloutBatch
from tests.foreshock.batches import random_batch
from tests.foreshock.lint.conftest import recorded_step

# Rounding and alignment are counted over a sample of tokens, which depends on the shards.
SAMPLED = ("rounding", "as_bfloat16", "as_float16", "shift")


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


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), order=st.permutations(range(26)), parts=st.integers(1, 6))
def test_any_split_in_any_order_gives_same_evidence(seed: int, order: list[int], parts: int) -> None:
    batch = damaged_batch(seed)
    whole = collect_evidence(batch)
    shards = [batch.select(np.array(rows)) for rows in np.array_split(order, parts)]
    merged = reduce(LintEvidence.merge, [collect_evidence(shard) for shard in shards])
    for name in COUNTS:
        if not any(word in name for word in SAMPLED):
            assert merged.count(name) == whole.count(name), name
    for name in SUMS:
        if not name.startswith("shift") and "float16" not in name:
            assert merged.sum(name) == pytest.approx(whole.sum(name), rel=1e-6, abs=1e-6), name
    assert merged.missing.keys.tolist() == whole.missing.keys.tolist()
    assert merged.missing.counts[:, :2].tolist() == whole.missing.counts[:, :2].tolist()
    assert merged.groups.keys.tolist() == whole.groups.keys.tolist()
    assert merged.groups.counts.tolist() == whole.groups.counts.tolist()
    assert merged.rollout_hashes.repeats(0.0)[0] == pytest.approx(whole.rollout_hashes.repeats(0.0)[0])
    assert [warning.name for warning in run_checks(merged).warnings] == [
        warning.name for warning in run_checks(whole).warnings
    ]


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
    assert evidence.counts.tolist() == expected.counts.tolist()
    assert evidence.examples == expected.examples
    assert [(warning.name, warning.seen) for warning in run_checks(evidence).warnings] == [
        (warning.name, warning.seen) for warning in run_checks(expected).warnings
    ]
