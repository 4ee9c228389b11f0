"""The cheap test bed of the closed loop: what lags, what is corrected, and that arms of one seed are comparable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks.closed_loop import bed
from benchmarks.closed_loop.arms import ARMS, Recorded, Rollback, length_decay
from benchmarks.closed_loop.bed import Layers, Setting, of_tokens, run, started, targets

SHORT = Setting("short", lag=2, rate=2e-3, steps=6, length=4)
CONSTANT = ARMS[0]


@pytest.fixture(autouse=True)
def early_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Train less before RL: it takes seconds."""
    monkeypatch.setattr(bed, "START_REWARD", 0.1)
    started.cache_clear()
    yield
    started.cache_clear()


def made(setting: Setting, *names: str, seed: int = 7) -> list[Recorded]:
    arms = [arm for name in names for arm in ARMS if arm.name == name]
    runs = [Recorded(arm, setting) for arm in arms]
    run(setting, [(seed, each) for each in runs])
    return runs


def test_responses_are_the_running_sum_of_repeated_digits() -> None:
    assert targets(torch.tensor([[1, 2, 3, 9]]), 6).tolist() == [[1, 3, 6, 5, 6, 8]]


def test_first_step_has_no_lag_and_later_ones_have_that_of_the_setting() -> None:
    (of_constant,) = made(SHORT, "constant")
    assert [each.lag for each in of_constant.measured] == [0.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert of_constant.measured[0].k3 == pytest.approx(0.0, abs=1e-9)
    assert of_constant.measured[-1].k3 > 1e-6
    (mixed,) = made(replace(SHORT, stale=0.5), "constant")
    assert mixed.measured[-1].lag == 1.0
    assert mixed.measured[-1].k3_at_lag_0 == pytest.approx(0.0, abs=1e-9)
    (shifted,) = made(replace(SHORT, shift=(4, 5)), "constant")
    assert [each.lag for each in shifted.measured] == [0.0, 0.0, 0.0, 2.0, 2.0, 0.0]


def test_noise_of_the_sampler_is_a_mismatch_without_any_lag() -> None:
    (noisy,) = made(replace(SHORT, lag=0, noise=0.05), "constant")
    assert noisy.measured[0].k3 > 1e-5


def test_run_is_the_same_alone_and_beside_others_and_another_seed_is_not() -> None:
    alone, beside = made(SHORT, "constant")[0], made(SHORT, "token-tis", "constant")[1]
    assert [each.reward for each in alone.measured] == [each.reward for each in beside.measured]
    assert alone.measured[-1].k3 == pytest.approx(beside.measured[-1].k3, rel=1e-3)
    assert made(SHORT, "constant", seed=8)[0].measured[-1].k3 != pytest.approx(alone.measured[-1].k3, rel=1e-3)


def test_sampled_log_probs_are_those_of_a_forward_pass() -> None:
    parameters, prompts = started(4), torch.randint(0, 10, (1, 64, 4))
    responses, log_probs = bed.sample(parameters, prompts, torch.rand(1, 64, 4))
    again = of_tokens(Layers.of(parameters, 4).of_responses(prompts, responses), responses)
    torch.testing.assert_close(log_probs, again)


def test_blind_arm_logs_neither_lags_nor_updates_and_shadow_leaves_the_rate_alone() -> None:
    blind, late = made(replace(SHORT, rate=1.0), "blind-tis", "from-40-tis")
    assert set(late.scales) == {1.0}
    names = set(blind._logged(blind.measured[-1]))
    assert {name for name in names if "lag" in name or "update" in name} == set()
    assert any("lag" in name for name in late._logged(late.measured[-1]))


def test_responses_of_a_setting_that_grows_end_and_their_lengths_decide_the_schedule() -> None:
    ended = torch.tensor([[3, bed.END, 4, bed.END], [1, 2, 3, 4]])
    assert bed.before_end(ended).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    (grows,) = made(replace(SHORT, length=8, grows=True), "constant")
    assert all(64 * 3 < each.tokens < 64 * 8 for each in grows.measured)
    lengths = [100] * 9 + [199, 200]
    assert [length_decay([*lengths, *[300] * 99], step) for step in (12, 20, 38, 57, 76, 90)] == pytest.approx(
        [1.0, 0.5, 0.25, 0.125, 0.1, 0.1]
    )
    assert length_decay(lengths[:-1], 40) == 1.0


def test_rollback_brings_back_the_weights_of_the_best_checkpoint_and_switches_the_correction_on() -> None:
    rule = Rollback()
    rewards = [0.5] * 20 + [0.9] * 20 + [0.1] * 8
    targets_of = {step: rule.target(step, reward) for step, reward in enumerate(rewards, 1)}
    assert {step: at for step, at in targets_of.items() if at is not None} == {42: 31}
    assert rule.is_corrected

    class Back(Recorded):
        def observe(self, measured: bed.Measured) -> None:
            super().observe(measured)
            self.goes_back_to = 1 if measured.step == 4 else None

    once, twice = Back(CONSTANT, SHORT), Recorded(CONSTANT, SHORT)
    run(SHORT, [(7, once), (7, twice)])
    assert once.measured[4].k3 == pytest.approx(0.0, abs=1e-9)
    assert [each.k3 for each in once.measured[:4]] == [each.k3 for each in twice.measured[:4]]
    assert twice.measured[4].k3 > 1e-6
