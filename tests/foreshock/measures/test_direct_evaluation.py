"""The library's measures equal a direct float64 evaluation of the formulas to 1e-9 relative."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.measures import ComparisonStatistics, measure_step
from foreshock.measures.estimators.intervals import student_t_quantile
from foreshock.measures.registry import TOKENS_BY_LAG
from foreshock.rollouts import RolloutBatch
from foreshock.rollouts.rollout_files import read_rollout_file
from tests.foreshock.batches import compared, random_batch, recorded_run
from tests.foreshock.measures.direct import INTERVALS, broken_batch, direct_measures, measured_sequences, plainly_logged

RELATIVE = 1e-9


def measured(batch: RolloutBatch) -> dict[str, float]:
    return compared(batch).statistics.measures()


def assert_equal(found: dict[str, float], expected: dict[str, float], scales: dict[str, float] | None = None) -> None:
    """Assert equality to 1e-9, or to 1e-12 of the `scales` of measures whose terms may cancel."""
    wrong = {
        name: (found[name], value)
        for name, value in expected.items()
        if not math.isclose(found[name], value, rel_tol=RELATIVE, abs_tol=1e-12 * (scales or {}).get(name, 0.0))
        and not (math.isnan(value) and math.isnan(found[name]))
    }
    assert not wrong


def cancelling(batch: RolloutBatch) -> dict[str, float]:
    """Return the means of absolute values of terms that may cancel: in the measures of advantages, and in `ppl_ratio`,
    whose difference from 1 is what is added up."""
    sequences, _ = measured_sequences(batch)
    known = [token for part in sequences for token in part if math.isfinite(token.advantage)]
    if not known:
        return {"ppl_ratio": 1.0}
    products = [abs(token.advantage * token.d) for token in known]
    skews = [abs(token.advantage * math.expm1(token.d)) for token in known]
    return {
        "ppl_ratio": 1.0,
        "advantage_d_cov": math.fsum(products) / len(known),
        "advantage_skew": math.fsum(skews) / len(known),
    }


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 100_000),
    rollouts=st.integers(2, 30),
    sizes=st.sampled_from([(1e-6, 1e-4), (1e-6, 1.0), (1e-3, 3.0), (1e-6, 30.0), (5.0, 30.0)]),
)
def test_every_measure_equals_its_formula(seed: int, rollouts: int, sizes: tuple[float, float]) -> None:
    batch = random_batch(seed, rollouts, 60, *sizes)
    direct = direct_measures(batch)
    found = measured(batch)
    errors = {name: direct.pop(f"{name}_standard_error") for name in INTERVALS}
    assert_equal(found, direct, cancelling(batch))
    groups = len(
        {group for group, length in zip(batch.group_ids or [], batch.generated_lengths, strict=True) if length}
    )
    for name, error in errors.items():
        if groups > 1:
            reach = student_t_quantile(0.975, groups - 1) * error
            low = found[name] - reach if name == "kl" else max(found[name] - reach, 0.0)
            width = found[name] + reach - low
            assert found[f"{name}_high"] - found[f"{name}_low"] == pytest.approx(width, rel=1e-7)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 100_000), rollouts=st.integers(2, 20), largest=st.sampled_from([1e-4, 1.0, 30.0]))
def test_invalid_tokens_do_not_change_other_tokens(seed: int, rollouts: int, largest: float) -> None:
    batch = broken_batch(seed, rollouts, (1e-6, largest))
    if not measured_sequences(batch)[0]:
        return
    direct = {name: value for name, value in direct_measures(batch).items() if not name.endswith("standard_error")}
    assert_equal(measured(batch), direct, cancelling(batch))


def test_batch_of_no_tokens_and_a_batch_of_no_rollouts_have_no_measures() -> None:
    for offsets in ([0], [0, 0, 0]):
        statistics = ComparisonStatistics.of([], [], offsets, token_ids=[], lag=[], entropy=[], turn=[], advantage=[])
        counts = {"tokens", "rollouts", "prompt_groups", "incomplete_rollouts"}
        counts |= {"nonfinite_target", "nonfinite_behaviour", "low_probability_tokens"}
        counts |= {measure.column for measure in TOKENS_BY_LAG}
        measures = statistics.measures()
        assert {name: measures[name] for name in counts} == dict.fromkeys(counts, 0) | {"rollouts": len(offsets) - 1}
        assert all(math.isnan(value) for name, value in measures.items() if name not in counts)
        assert ComparisonStatistics.from_bytes(statistics.to_bytes()).to_bytes() == statistics.to_bytes()
        full = measure_step(random_batch(0)).comparisons["trainer/rollout"].statistics
        assert full.merge(statistics).tokens == statistics.merge(full).tokens == full.tokens


def test_rollouts_without_groups_are_clusters_of_their_own() -> None:
    grouped = random_batch(5, 20, 60)
    batch = dataclasses.replace(grouped, group_ids=None)
    some = dataclasses.replace(grouped, group_ids=[f"prompt-{row}" if row % 2 else None for row in range(20)])
    error = direct_measures(batch)["k3_kl_standard_error"]
    clusters = int((batch.generated_lengths > 0).sum())
    reach = student_t_quantile(0.975, clusters - 1) * error
    for alone in (batch, some):
        found = measured(alone)
        assert found["k3_kl_high"] == pytest.approx(found["k3_kl"] + reach, rel=1e-9)
        assert found["k3_kl_low"] == pytest.approx(max(found["k3_kl"] - reach, 0.0), rel=1e-9)
        assert found["surprisal_z"] == pytest.approx(direct_measures(alone)["surprisal_z"], rel=1e-9)


def test_entropies_of_the_trainer_give_no_surprisal() -> None:
    of_behaviour = random_batch(5, 20, 60)
    declared = dataclasses.replace(of_behaviour.attributes, entropy_policy="trainer")
    of_trainer = dataclasses.replace(of_behaviour, attributes=declared)
    found, expected = measured(of_trainer), measured(of_behaviour)
    assert math.isnan(found.pop("surprisal_z"))
    assert not math.isnan(expected.pop("surprisal_z"))
    np.testing.assert_equal(found, expected)


def test_advantages_are_unambiguous_with_one_token_per_rollout() -> None:
    batch = RolloutBatch.from_lists(
        ["a", "b", "c"], [[1]] * 3, [[1, 2], [], [3]],
        rollout_log_probs=[[-1.0, -2.0], [], [-0.5]], trainer_log_probs=[[-1.5, -1.0], [], [-0.25]],
        advantage=[1.0, 5.0, -1.0],
    )  # fmt: skip
    assert not batch.advantage_per_token
    assert batch.num_tokens == batch.num_rollouts
    for one in (batch, dataclasses.replace(batch, advantage_per_token=True)):
        expected = {name: value for name, value in direct_measures(one).items() if "advantage" in name}
        assert_equal(measured(one), expected)


@pytest.mark.shared
@pytest.mark.parametrize("run", ["healthy", "collapsed"])
def test_recorded_runs_equal_the_formulas_and_the_trainers_logs(run: str) -> None:
    folder = recorded_run(run)
    logged = [json.loads(line) for line in (folder.parent / "metrics.jsonl").read_text().splitlines()]
    for line in (logged[0], *logged[39::40]):
        step = line["step"]
        batch = read_rollout_file(folder / f"step_{step:04d}.jsonl.gz")
        measurement = measure_step(batch)
        found = measurement.comparisons["trainer/rollout"].statistics.measures()
        of_step = measurement.step.measures()
        # The trainer computed k3 in float32, which is the trap: only the first digits can agree.
        assert found["k3_kl"] == pytest.approx(line["k3"], rel=0.05, abs=2e-8)
        assert found["max_abs_d"] == pytest.approx(line["max_abs"], rel=1e-6)
        assert of_step["response_length_mean"] == line["response_length"]
        assert of_step["reward_mean"] == pytest.approx(line["reward"], rel=1e-6)
        assert_equal(found, plainly_logged(direct_measures(batch)))
