"""A fall of the reward by data source: another mix, one source only, or all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from foreshock.diagnosis.diagnose import diagnose
from foreshock.diagnosis.history import History, SteppedValues
from foreshock.diagnosis.source_rewards import sources_in_fall
from tests.foreshock.diagnosis.test_cut_responses import fallen

Setup = Mapping[str, tuple[int, float]]
"""Data source → its rollouts in a step, and its mean reward."""

_MATH = {"math": (40, 0.7), "code": (20, 0.34)}
_MOSTLY_CODE = {"math": (15, 0.7), "code": (45, 0.34)}
_NO_SANDBOX = {"math": (40, 0.7), "code": (20, 0.0)}
_WORSE = {"math": (40, 0.3), "code": (20, 0.15)}


def sampled(of_step: Callable[[int], Setup], seed: int = 1) -> dict[int, dict[str, tuple[int, float]]]:
    """Return the number and the sum of rewards of 0 or 1 by step and source; the number varies from step to step."""
    generator = np.random.default_rng(seed)
    found = {}
    for step in range(67, 131):
        counts = {name: int(generator.poisson(count)) + 1 for name, (count, _) in of_step(step).items()}
        found[step] = {
            name: (count, float(generator.binomial(count, of_step(step)[name][1]))) for name, count in counts.items()
        }
    return found


def since(step: int, later: Setup) -> Callable[[int], Setup]:
    return lambda at: later if at >= step else _MATH


def history_of(of_step: Callable[[int], Setup], seed: int = 1) -> History:
    sources = sampled(of_step, seed)
    means = []
    for each in sources.values():
        counts, totals = zip(*each.values(), strict=True)
        means.append(sum(totals) / sum(counts))
    return replace(fallen(0.2, cut=0.04), sources=sources, reward=SteppedValues(list(sources), means))


def test_a_fall_with_another_mix_asks_for_no_way_back() -> None:
    found = diagnose(history_of(since(76, _MOSTLY_CODE)))
    assert re.search(r"; 7\d % of the rollouts are of code since step 76", found.headline)
    assert found.next_steps[0].startswith("Compare the reward by data source across step 76")


def test_another_mix_is_told_without_an_alert_with_its_step() -> None:
    found = diagnose(replace(history_of(since(90, _MOSTLY_CODE)), alerts=()))
    assert found.verdict == "healthy"
    assert re.search(r"but 7\d % of the rollouts are of code since step 90", found.headline)


def test_the_fall_of_one_source_names_it() -> None:
    of_step = since(76, _NO_SANDBOX)
    found = diagnose(history_of(of_step))
    assert "only the reward of data source code fell, from 0.3" in found.headline
    assert found.next_steps[0].startswith("Read responses of code from before and since step 76")


@pytest.mark.parametrize("later", [_WORSE, {"math": (60, 0.2)}])
def test_a_fall_of_all_sources_is_none_of_the_mix(later: Setup) -> None:
    found = diagnose(history_of(since(76, later)))
    assert {each.name for each in found.causes}.isdisjoint({"data_sources_changed", "one_data_source_fell"})


def test_a_mix_that_varies_by_itself_is_not_told() -> None:
    """100 runs whose shares wander and whose reward swings; no alert is open."""

    def wandering(seed: int) -> Callable[[int], Setup]:
        share = np.random.default_rng(seed).normal(size=140).cumsum() * 0.03
        swing = 0.15 * np.sin(np.arange(140) / 9.0 + seed)
        return lambda step: {
            "math": (int(60 * np.clip(0.6 + share[step], 0.1, 0.9)), 0.55 + swing[step]),
            "code": (int(60 * np.clip(0.4 - share[step], 0.1, 0.9)), 0.5 + swing[step]),
        }

    told = [seed for seed in range(100) if sources_in_fall(replace(history_of(wandering(seed), seed), alerts=()), None)]
    assert len(told) <= 1
