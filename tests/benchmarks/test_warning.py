"""Runs that others published: their parts, and collapses that are noise."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.warning import PUBLISHED, Run, is_locked, without_noise
from foreshock.backtest.replay import replay_run
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration
from foreshock.diagnosis.quantities import REWARD_KEY


def run_of(rewards: list[float]) -> Run:
    steps = [ClosedStep(step, {REWARD_KEY: reward}) for step, reward in enumerate(rewards, 1)]
    return Run(replay_run("owner/repository#01", steps, WarningConfiguration(), 0.0), steps)


def test_runs_of_a_repository_are_in_one_part() -> None:
    assert is_locked("cfw20/cs224r-project-e3#01")
    assert is_locked("cfw20/cs224r-project-e3#15")
    assert not is_locked("TiandaSun/KG_GRPO#01")


@pytest.mark.parametrize(("spread", "collapses"), [(0.05, True), (0.7, False)])
def test_only_a_fall_beyond_the_noise_is_a_collapse(spread: float, collapses: bool) -> None:
    # The medians of five are 0.7 and 0.3 in both, so the definition holds.
    offsets = np.resize([0.0, spread, -spread, 0.0, 0.0], 30)
    found = run_of([*(0.7 + offsets), *(0.3 + offsets)])
    assert found.replayed.usable
    kept = without_noise(found)
    assert (kept.replayed.collapse is not None, kept.replayed.usable) == (collapses, collapses)


def test_every_published_run_has_a_reward_and_a_source() -> None:
    sources = (PUBLISHED.parent / "SOURCES.md").read_text()
    table = pq.read_table(PUBLISHED, columns=["run", REWARD_KEY]).to_pydict()
    rewards = Counter(run for run, reward in zip(table["run"], table[REWARD_KEY], strict=True) if reward is not None)
    assert len(rewards) == 39
    assert min(rewards.values()) >= 40
    for run in rewards:
        part = "locked" if is_locked(run) else "tuning"
        assert re.search(rf"^\| {re.escape(run)} \| \w+ \| [\w.-]+ \| {part} \|", sources, re.MULTILINE)
