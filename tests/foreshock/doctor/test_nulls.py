"""Each test of the doctor has a null: what it gives without a fault, and that it can fail."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from foreshock.doctor import Budget, Change, examine
from foreshock.doctor.catalogue import Variant
from foreshock.doctor.evidence import Compared, chance_of
from foreshock.doctor.floors import ONE_OF_TWO_ROUNDINGS, Floors
from foreshock.doctor.nulls import chosen_by_chance, expected_by_chance, gain_of, healthy_share
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


def test_the_best_of_wrong_causes_hardly_ever_stands_out() -> None:
    random = np.random.default_rng(3)
    draws = [np.sort(random.exponential(0.2, 20)) for _ in range(2_000)]
    found = np.array([expected_by_chance(each[-1], each[:-1].tolist()) for each in draws])
    assert (found < 0.01).mean() < 0.02
    assert np.median(found) > 0.3


def test_a_cause_stands_out_by_what_it_leaves_and_not_without_others_to_compare() -> None:
    others = [gain_of(share) for share in (0.02, 0.01, 0.3, 0.05, -0.4, 0.03, 0.1, 0.02)]
    assert expected_by_chance(gain_of(0.99), others) < 0.01
    assert expected_by_chance(gain_of(0.3), others) > 0.01
    assert expected_by_chance(gain_of(0.99), []) == np.inf


def test_a_choice_between_equal_replays_explains_no_more_than_by_chance_and_a_mixture_does() -> None:
    random = np.random.default_rng(3)
    whole = random.chisquare(12, 40)
    by_chance = chosen_by_chance(whole, np.arange(40), 2, 0.99)
    chosen = [1 - np.minimum(whole, random.permutation(whole)).sum() / whole.sum() for _ in range(500)]
    mixed = np.where(np.arange(40) % 2, whole, whole / 1_000)
    assert np.mean(np.array(chosen) > by_chance) < 0.05
    assert chosen_by_chance(mixed, np.arange(40), 2, 0.99) < 1 - (whole / 1_000).sum() / mixed.sum()


def test_precisions_explain_of_one_another_what_the_base_is_farther_off() -> None:
    batch = rollouts()
    lab = FakeExperimenter(batch)
    sizes = {"bfloat16": 0.02, "autocast": 0.02, "float32": 0.02}
    plain = lab.logits

    def logits(change: Change, rows: tuple[int, ...] = ()) -> NDArray[np.float32]:
        still = plain(Change.of(**dict(change.values) | {"precision": "float32"}), rows)
        name = str(change.get("precision"))
        return still + np.float32(sizes[name]) * lab._random(1, name)[: still.shape[0]].astype(np.float32)

    lab.logits = logits  # type: ignore[method-assign]

    def shares() -> tuple[float, float]:
        replays = Replays(lab, Budget(), lambda line: None)
        noise = np.random.default_rng(4).normal(0, 0.001, batch.num_tokens).astype(np.float32)
        compared = Compared.of(batch, logged(lab) + noise)
        return Floors("rollout", replays, compared, Change.of(weights="step_10"), (Sampling(),)).precision_shares

    assert max(shares()) < 0.2  # all three are equally far from one another
    sizes["bfloat16"] = 0.08  # the base is far from the two others
    assert min(shares()) > 0.7


def test_noise_of_other_batches_is_never_above_rounding() -> None:
    batch = rollouts()
    lab = FakeExperimenter(batch)
    lab.sizes_of_compositions["other"] = 0.5
    noise = np.random.default_rng(4).normal(0, 0.001, batch.num_tokens).astype(np.float32)
    compared = Compared.of(batch, logged(lab) + noise)
    replays = Replays(lab, Budget(), lambda line: None)
    floors = Floors("rollout", replays, compared, Change.of(weights="step_10"), (Sampling(),))
    assert floors.noise_of("bfloat16") == (floors.rounding, floors.weighted_rounding)


def test_a_variant_that_removes_one_of_two_roundings_explains_half() -> None:
    random = np.random.default_rng(3)
    of_log, of_replay = random.normal(0, 0.02, (2, 20_000))
    without = 1 - (of_log**2).sum() / ((of_log - of_replay) ** 2).sum()
    assert without == pytest.approx(ONE_OF_TWO_ROUNDINGS, abs=0.02)


def test_what_explains_no_more_than_a_precision_does_is_not_named() -> None:
    """Most of the differences are those of a variant, and the rest is beyond what precisions differ by."""
    batch = rollouts()
    lab = FakeExperimenter(batch)
    rest = np.random.default_rng(4).normal(0, 0.02, batch.num_tokens).astype(np.float32)
    part = 0.5 * (logged(lab, weights="step_7") - logged(lab))
    report = examine(replace(batch, rollout_log_probs=logged(lab) + part + rest, trainer_log_probs=logged(lab)), lab)
    assert [(each.kind, each.side) for each in report.findings] == [("unknown", "rollout")]


def test_a_cause_is_named_only_if_it_stands_out_among_others_or_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = rollouts()
    lab = FakeExperimenter(batch)
    noise = np.random.default_rng(4).normal(0, 0.01, batch.num_tokens).astype(np.float32)
    mu = np.minimum(logged(lab, temperature=0.8) + noise, 0)
    sides = replace(batch, rollout_log_probs=mu, trainer_log_probs=logged(lab))
    assert [each.cause for each in examine(sides, lab).causes] == ["temperature"]
    monkeypatch.setattr("foreshock.doctor.naming.expected_by_chance", lambda gain, others: 1.0)
    assert [each.cause for each in examine(sides, lab).causes] == ["temperature"]
    monkeypatch.setattr("foreshock.doctor.naming.chance_of", lambda improvements: 1.0)
    assert examine(sides, lab).causes == ()


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
