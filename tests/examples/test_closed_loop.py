"""The closed loop without an engine: plan, arms, outcomes, and what the document claims."""

import json
import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from examples.closed_loop import outcome
from examples.closed_loop.__main__ import RESULTS, needed_by
from examples.closed_loop.analyse import DOCUMENT, document
from examples.closed_loop.arms import control_of, scales_of, sequence_weights, token_weights
from examples.closed_loop.plan import ARMS, FIRST_SEED, HARM, SEEDS, SETTINGS, Arm, Plan, plans
from examples.collapses.grid import SEEDS as SEEDS_OF_THE_GRID
from examples.collapses.results import Result, read_results
from examples.collapses.run import START
from examples.collapses.sampling import EngineSource
from examples.tiny_rl.model import load_model
from examples.tiny_rl.trainer import Trainer, TrainerOptions
from foreshock.diagnosis.mismatch_rules import K3
from foreshock.diagnosis.quantities import UPDATE_KEY

SETTING = SETTINGS[0]
HEALTHY = [0.5] * 150
COLLAPSING = [0.5] * 60 + [0.1] * 90


def result(plan: Plan, rewards: list[float], scales: list[float] | None = None) -> Result:
    steps = np.arange(1, len(rewards) + 1, dtype=np.int32)
    columns = {
        "rollout:reward_mean": np.array(rewards, np.float32),
        "scalars:lr": np.array([plan.setting.learning_rate * scale for scale in scales or [1.0] * 150], np.float32),
    }
    return Result(plan.to_json(), "all steps", 1.0, 2.0, {}, steps, columns)


def results(rewards: Mapping[Arm, list[float]], seeds: int = 2) -> dict[str, Result]:
    chosen = [plan for plan in plans(seeds) if plan.setting == SETTING]
    return {plan.name: result(plan, rewards.get(plan.arm, COLLAPSING)) for plan in chosen}


def test_every_run_comes_after_those_it_is_made_from_and_seeds_are_new() -> None:
    order = [plan.name for plan in plans()]
    assert len(set(order)) == len(order) == len(SETTINGS) * len(ARMS) * SEEDS + len(HARM) * 2 * SEEDS
    for plan in plans():
        assert all(order.index(other.name) < order.index(plan.name) for other in needed_by(plan))
        assert plan.seed >= FIRST_SEED > SEEDS_OF_THE_GRID
        assert plan.of(plan.arm, plan.partner).partner == plan.seed != plan.partner
    assert SEEDS >= 10
    with pytest.raises(ValueError, match="even"):
        plans(3)


def test_schedules_of_the_arms() -> None:
    advice = {FIRST_SEED: [1.0] * 100 + [0.5] * 50, FIRST_SEED + 1: [1.0] * 50 + [0.25] * 100}

    def finished(plan: Plan) -> Result:
        assert plan.arm == "advice"
        return result(plan, HEALTHY, advice[plan.seed])

    scales = {
        arm: [control_of(Plan(SETTING, arm, FIRST_SEED), finished).scale(step) for step in range(1, 151)]
        for arm in ARMS
    }
    for arm in ("twin", "constant", "token-tis", "sequence-mis", "advice", "advice-mis", "length-decay"):
        assert scales[arm] == [1.0] * 150
    assert scales["tenth"] == [0.1] * 150
    assert scales["cosine"][0] == 1.0
    assert scales["cosine"][75] == pytest.approx(0.5)
    assert 0.0 < scales["cosine"][-1] < 1e-3
    assert scales["matched"] == pytest.approx([125 / 150] * 150)
    assert scales["sham"] == advice[FIRST_SEED + 1]


def test_advice_arm_lowers_the_rate_from_the_step_after_the_driven_part_rose() -> None:
    def scales(arm: Arm, update: float) -> list[float]:
        control = control_of(Plan(SETTING, arm, FIRST_SEED), lambda plan: pytest.fail("needs no other run"))
        for step in range(1, 41):
            values = {"rollout:lag_mean": 0.0 if step == 1 else 8.0, "rollout:reward_mean": 0.5}
            control.observe(step, values | {K3: 2e-4 if step <= 20 else 5e-2, UPDATE_KEY: update})
        return [control.scale(step) for step in (1, 21, 28, 41)]

    for arm in ("advice", "advice-mis"):
        found = scales(arm, 1e-4)
        assert found[:2] == [1.0, 1.0]
        assert 1.0 > found[2] > found[3]
    # An update that is too large lowers it at once, without any mismatch.
    assert scales("advice", 1e-1)[1] < 0.5
    assert scales("length-decay", 1e-1) == [1.0] * 4


def test_shifted_dose_lags_in_its_window_only() -> None:
    class Engine:
        def load(self, weights: object) -> None:
            self.loaded = weights

    settings = Plan(SETTINGS[5], "constant", FIRST_SEED).settings
    source = EngineSource(Engine(), settings, {})  # type: ignore[arg-type]
    lags = []
    for step in range(1, 151):
        lags.append(step - 1 - source.version)
        source.sync(step, {})
    assert lags == [0] * 60 + [8] * 45 + [0] * 45


def test_weights_of_the_corrections_are_those_of_their_formulas() -> None:
    d = torch.tensor([[0.0, math.log(1.5), math.log(3.0), 0.0], [-1.0, 0.2, 0.3, 0.1]])
    assert torch.allclose(token_weights(d)[0], torch.tensor([1.0, 1.5, 2.0, 1.0]))
    sequence = sequence_weights(d)
    # ρ_seq = 4.5 is beyond 2; the other is exp(−0.4), the same for each of its tokens.
    assert sequence[0].tolist() == [0.0] * 4
    assert torch.allclose(sequence[1], torch.full((4,), math.exp(-0.4)))


def test_correction_weights_the_gradient_and_none_leaves_it_as_it_was() -> None:
    prompts, responses, advantages = [[1, 2], [3, 4]], [[5, 6, 7], [8, 9]], np.array([1.0, -0.5])

    def updated(correction: object) -> list[torch.Tensor]:
        trainer = Trainer(load_model(START), TrainerOptions(learning_rate=1e-3))
        trainer.step(prompts, responses, advantages, correction=correction)  # type: ignore[arg-type]
        return [parameter.detach().clone() for parameter in trainer.model.parameters()]

    plain = updated(None)
    assert all(map(torch.equal, plain, updated(lambda log_pi, mask: torch.ones_like(log_pi))))
    dropped = updated(lambda log_pi, mask: torch.tensor([[1.0], [0.0]]).expand_as(log_pi))
    assert not all(map(torch.equal, plain, dropped))


def test_outcome_is_the_reward_of_the_last_fifth_and_the_share_of_the_learning_rate() -> None:
    plan = Plan(SETTING, "advice", FIRST_SEED)
    found = outcome.outcome_of(plan, result(plan, [0.9] * 120 + [0.6] * 30, [1.0] * 75 + [0.5] * 75))
    assert found.last_reward == pytest.approx(0.6)
    assert found.learning_rate_share == pytest.approx(0.75)
    assert (found.first_change, found.collapse) == (76, None)
    # Weights that are not finite end a run: what it lacks is no reward.
    early = outcome.outcome_of(plan, result(plan, [0.5] * 130, [1.0] * 130))
    assert early.last_reward == pytest.approx(0.5 * 10 / 30)
    assert scales_of(result(plan, HEALTHY)) == [1.0] * 150


def row(text: str, name: str, after: str) -> str:
    """Return the row of the first table behind a text."""
    return next(line for line in text.partition(after)[2].splitlines() if line.startswith(f"| `{name}`"))


def test_arms_are_compared_over_the_seeds_of_the_advice_and_missing_ones_have_no_figure() -> None:
    found = results({"twin": HEALTHY, "advice": HEALTHY}, 4)
    del found[Plan(SETTING, "sham", FIRST_SEED + 1).name]
    seeds = [FIRST_SEED + n for n in range(4)]
    assert outcome.compared_seeds(outcome.outcomes(found, 4), SETTING.name) == seeds
    assert "sham" not in outcome.arms_with(outcome.outcomes(found, 4), SETTING.name, seeds)
    text = document(found, 4)
    assert row(text, "constant", "the collapsed seeds") == "| `constant` | 0.10 (4) | – | – | – | – | – |"
    assert row(text, "sham", "the collapsed seeds") == "| `sham` | – | – | – | – | – | – |"
    del found[Plan(SETTING, "advice", FIRST_SEED + 1).name]
    assert row(document(found, 4), "constant", "the collapsed seeds") == "| `constant` | – | – | – | – | – | – |"


def test_interval_over_seeds_covers_the_mean() -> None:
    random = np.random.default_rng(3)
    covered = 0
    for _ in range(400):
        low, high = outcome.paired_interval(random.normal(0.1, 0.2, size=10))
        covered += low <= 0.1 <= high
    # A bootstrap of ten values is a little too narrow.
    assert 0.86 <= covered / 400 <= 0.97
    assert outcome.paired_interval([0.1]) == (-math.inf, math.inf)


def test_document_is_that_of_the_committed_results() -> None:
    assert DOCUMENT.read_text("utf-8") == document(read_results(RESULTS))


def test_committed_results_are_small_and_their_settings_are_those_of_the_plan() -> None:
    found = read_results(RESULTS)
    planned = {plan.name: plan for plan in plans()}
    assert found
    for name, each in found.items():
        assert each.settings == json.loads(json.dumps(planned[name].to_json()))
    assert sum(path.stat().st_size for path in RESULTS.glob("*.parquet")) < 20e6
