"""Tests of ForeshockLR: the rates are those of the wrapped scheduler times the scale."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, ReduceLROnPlateau

from foreshock.learning_rate import ForeshockLR, applied_learning_rates, apply_scale
from tests.foreshock.learning_rate.test_apply import SCHEDULERS, rates, scale_at, sgd


class Advised:
    """A feed with scales by step, a state, and a record of acknowledgements."""

    def __init__(self, scale_of: Callable[[int], float] = scale_at, state: Any = "fresh") -> None:
        self.scale, self.state, self.acknowledged = scale_of, state, list[tuple[int, float, float]]()

    def acknowledge(self, step: int, rate: float, scale: float) -> None:
        self.acknowledged.append((step, rate, scale))

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


@pytest.mark.parametrize("steps_of_optimizer", [0, 1, 3])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_rate_is_that_of_the_wrapped_scheduler_times_the_scale(name: str, steps_of_optimizer: int) -> None:
    plain, scaled = sgd(groups=2), sgd(groups=2)
    inner = SCHEDULERS[name](plain)
    wrapper = ForeshockLR(scaled, scale_at, SCHEDULERS[name](scaled), first_step=0)
    plain.step()
    scaled.step()
    for step in range(12):
        assert rates(scaled) == pytest.approx([rate * scale_at(step) for rate in rates(plain)], rel=1e-12)
        assert wrapper.get_last_lr() == rates(scaled)
        for _ in range(steps_of_optimizer):
            scaled.step()
        inner.step()
        wrapper.step()


def test_plateau_scheduler_gets_its_metric() -> None:
    optimizer = sgd(1.0)
    scheduler = ForeshockLR(optimizer, lambda step: 0.5, ReduceLROnPlateau(optimizer, factor=0.1, patience=0))
    for metric in (1.0, 1.0, 1.0):
        scheduler.step(metric)
    assert rates(optimizer) == pytest.approx([0.5 * 0.01])


def test_training_step_counts_optimizer_steps_or_calls_a_function() -> None:
    optimizer = sgd(1.0)
    scheduler = ForeshockLR(optimizer, lambda step: 1 / step, first_step=1, steps_per_training_step=4)
    assert isinstance(scheduler, LRScheduler)
    seen = []
    for _ in range(12):
        seen.append(rates(optimizer)[0])
        scheduler.step()
    assert seen == [1.0] * 4 + [0.5] * 4 + [1 / 3] * 4
    now = [7]
    scheduled = ForeshockLR(sgd(1.0), lambda step: 1 / step, training_step=lambda: now[0])
    assert scheduled.get_last_lr() == [1 / 7]
    now[0] = 8
    scheduled.step()
    assert scheduled.get_last_lr() == [1 / 8]


def test_applied_rate_is_acknowledged() -> None:
    optimizer, advised = sgd(1.0, groups=2), Advised(lambda step: 0.5)
    scheduler = ForeshockLR(optimizer, advised, ExponentialLR(optimizer, 0.5))
    optimizer.step()
    scheduler.step()
    assert advised.acknowledged == [(1, 0.5, 0.5), (2, 0.25, 0.5)]


def saved(*states: Any) -> list[Any]:
    buffer = io.BytesIO()
    torch.save(list(states), buffer)
    buffer.seek(0)
    return list(torch.load(buffer, weights_only=True))


@pytest.mark.parametrize("optimizer_first", [True, False])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_resume_continues_the_same_rates(name: str, optimizer_first: bool) -> None:
    def build() -> tuple[torch.optim.Optimizer, ForeshockLR, Advised]:
        optimizer, advised = sgd(), Advised()
        return optimizer, ForeshockLR(optimizer, advised, SCHEDULERS[name](optimizer), first_step=0), advised

    def run(optimizer: torch.optim.Optimizer, scheduler: ForeshockLR, steps: int) -> list[float]:
        seen = []
        for _ in range(steps):
            seen += rates(optimizer)
            optimizer.step()
            scheduler.step()
        return seen

    optimizer, scheduler, advised = build()
    whole = run(optimizer, scheduler, 6)
    advised.state = "kept"
    of_optimizer, of_scheduler = saved(optimizer.state_dict(), scheduler.state_dict())
    whole += run(optimizer, scheduler, 6)

    resumed_optimizer, resumed_scheduler, resumed_advised = build()
    loads: list[Callable[[], object]] = [
        lambda: resumed_optimizer.load_state_dict(of_optimizer),
        lambda: resumed_scheduler.load_state_dict(of_scheduler),
    ]
    for load in loads if optimizer_first else reversed(loads):
        load()
    assert resumed_advised.state == "kept"
    assert run(resumed_optimizer, resumed_scheduler, 6) == pytest.approx(whole[6:], rel=1e-12)


def test_works_beside_apply_scale() -> None:
    optimizer = sgd(1.0)
    scheduler = ForeshockLR(optimizer, scale_at, ExponentialLR(optimizer, 0.9), first_step=0)
    for step in range(8):
        apply_scale(optimizer, scale_at(step))
        assert applied_learning_rates(optimizer) == pytest.approx([0.9**step * scale_at(step)], rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_scheduler_of_another_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="another optimizer"):
        ForeshockLR(sgd(), scale_at, ExponentialLR(sgd(), 0.9))


def test_only_the_torch_scheduler_imports_torch() -> None:
    program = (
        "import sys, foreshock, foreshock.learning_rate, foreshock.client, foreshock.commands.main\n"
        "foreshock.Client, foreshock.AdviceFeed, foreshock.apply_scale\n"
        "assert 'torch' not in sys.modules\n"
        "foreshock.learning_rate.ForeshockLR\n"
        "assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
