"""Each test of the doctor has a null: what it gives without a fault, and that it can fail."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from foreshock.doctor import Budget, Change, examine
from foreshock.doctor.catalogue import Variant
from foreshock.doctor.evidence import Compared
from foreshock.doctor.floors import Floors
from foreshock.doctor.nulls import chance_of, healthy_share
from foreshock.doctor.replays import Replays
from foreshock.doctor.sampling import Sampling
from foreshock.doctor.trials import View
from tests.foreshock.doctor.fake import FakeExperimenter, logged, rollouts


def test_without_a_fault_few_improvements_are_unlikely() -> None:
    random = np.random.default_rng(3)
    chances = np.array([chance_of(random.standard_t(2, 40)) for _ in range(2_000)])

    assert (chances < 0.01).mean() < 0.02
    assert 0.4 < np.median(chances) < 0.6


def test_an_improvement_of_all_rollouts_is_unlikely_and_of_none_is_not() -> None:
    better = np.arange(1, 41).astype(np.float64)

    assert chance_of(better) < 1e-7
    assert chance_of(-better) > 0.99
    assert chance_of(np.zeros(40)) == 1.0


@pytest.mark.parametrize("precision", ["autocast", "float32"])
def test_a_variant_that_only_rounds_otherwise_explains_a_healthy_log(precision: str) -> None:
    batch = rollouts()
    lab = FakeExperimenter(batch)
    replays = Replays(lab, Budget(), lambda line: None)
    noise = np.random.default_rng(4).normal(0, 0.001, batch.num_tokens).astype(np.float32)
    compared = Compared.of(batch, logged(lab) + noise)
    floors = Floors("rollout", replays, compared, Change.of(weights="step_10"), (Sampling(),))
    rounds = Variant("kv_cache", "", Change.of(precision=precision))
    wrong = Variant("positions", "", Change.of(positions="zero"))

    assert min(healthy_share(replays, floors, (rounds,), View(compared), in_part=False)) > 0.9
    assert healthy_share(replays, floors, (wrong,), View(compared), in_part=False) == (0.0, 0.0)


@pytest.mark.parametrize(("share", "cause"), [(0.0, "rounding"), (0.02, "positions")])
def test_a_small_cause_that_leaves_no_more_than_other_batches_is_named(share: float, cause: str) -> None:
    """A fault far below ordinary rounding, of a scorer that the replay reproduces."""
    batch = rollouts()
    lab = FakeExperimenter(batch)
    plain = lab.logits

    def logits(change: Change, rows: tuple[int, ...] = ()) -> NDArray[np.float32]:
        if rows:
            return plain(change, rows)  # which selects from what this function returns for all rows
        moved, still = plain(change), plain(Change.of(**dict(change.values) | {"positions": None}))
        return np.asarray(still + np.float32(share) * (moved - still))

    lab.logits = logits  # type: ignore[method-assign]
    noise = np.random.default_rng(4).normal(0, 0.001, batch.num_tokens).astype(np.float32)
    mu, pi = logged(lab, positions="zero") + noise, logged(lab, precision="autocast") + noise
    report = examine(replace(batch, rollout_log_probs=mu, trainer_log_probs=pi), lab)

    assert [each.cause for each in report.findings] == [cause]
    assert max(each.before for each in report.sides) < min(each.rounding for each in report.sides)
