"""The figures that `make bench-connect` takes from the benchmark of statistics mode."""

from __future__ import annotations

import pytest

from benchmarks.connect import statistics_mode


def test_figures_are_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics_mode, "ROLLOUTS", 64)
    monkeypatch.setattr(statistics_mode, "MEAN_LENGTH", 200)
    monkeypatch.setattr(statistics_mode, "prepare_token_pass", lambda: False)
    cost = statistics_mode.measure(steps=2)
    assert cost.tokens == pytest.approx(64 * 200, rel=0.05)
    assert len(cost.cpu_seconds) == 2
    assert all(seconds > 0 for seconds in cost.cpu_seconds)
    assert cost.sampled_rollouts == 64
    assert 0 < cost.step_bytes < 1_000_000
