"""Prompts that come again in each step or after a resume, and epochs, which do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foreshock.diagnosis.diagnose import diagnose
from foreshock.diagnosis.history import History
from foreshock.diagnosis.repeated_prompts import repeated_prompts
from tests.foreshock.diagnosis.test_diagnose import HEALTHY


def drawn(count: int, seed: int, pool: int = 10**9) -> list[int]:
    """Return the 16 least of the hashes of a step's prompts, as a step keeps them."""
    random = np.random.default_rng(seed)
    chosen = random.choice(pool, count, replace=False) if pool < 10**9 else random.integers(0, pool, count)
    hashes = chosen * 2654435761 % (1 << 32)
    return sorted(map(int, np.unique(hashes)))[:16]


def titles(prompts: dict[int, list[int]], resumes: tuple[int, ...] = ()) -> list[str]:
    return [each.title for each in repeated_prompts(History(prompts=prompts, resumes=resumes))]


@pytest.mark.parametrize("count", [8, 200])
def test_the_same_prompts_in_each_step_are_told_beside_a_healthy_mismatch(count: int) -> None:
    history = replace(HEALTHY, prompts={step: drawn(count, 1) for step in range(40)})
    assert "but the same prompts are in each of the newest 40 steps" in diagnose(history).headline


def test_a_small_pool_is_told_with_its_repeats_and_a_large_one_is_not() -> None:
    (title,) = titles({step: drawn(8, step, pool=12) for step in range(40)})
    assert title == "the prompts of the newest 40 steps repeat: each is in 26 of them on average"
    (title,) = titles({step: drawn(300, step, pool=400) for step in range(40)})
    assert "repeat" in title
    assert titles({step: drawn(8, step, pool=64) for step in range(40)}) == []
    assert titles({step: drawn(64, step) for step in range(40)}) == []
    assert titles({step: drawn(8, 1) for step in range(5)}) == []


def test_a_loader_that_begins_again_at_a_resume_is_dated() -> None:
    prompts = {step: drawn(8, step if step < 61 else step - 60) for step in range(1, 90)}
    assert titles(prompts, (61,)) == ["since the resume at step 61 the prompts from step 1 on come again"]
    assert titles(prompts) == []
    assert titles({step: drawn(8, step) for step in range(1, 90)}, (61,)) == []


def test_epochs_of_one_order_go_on_over_a_resume() -> None:
    assert titles({step: drawn(8, step % 20) for step in range(1, 90)}, (61,)) == []
