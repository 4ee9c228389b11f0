"""Tests of apply_scale: the rate is the base rate of any scheduler times the scale, and never compounds."""

import copy
import io
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from foreshock import learning_rate


class PlainOptimizer:
    """An optimizer with only param groups."""

    def __init__(self, *rates: Any) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": rate} for rate in rates]


def sgd(rate: Any = 1.0, groups: int = 1) -> torch.optim.SGD:
    parameters = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate / (index + 1)} for index in range(groups)]
    optimizer = torch.optim.SGD(parameters, lr=rate)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones(2)
    return optimizer


SCHEDULERS: dict[str, Any] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "warm-up": lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, step / 4)),
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.9),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=15, eta_min=0.01),
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=5),
    "step": lambda optimizer: StepLR(optimizer, 3, 0.5),
    "multi-step": lambda optimizer: MultiStepLR(optimizer, [2, 5], 0.1),
    "linear": lambda optimizer: LinearLR(optimizer, 0.1, 1.0, 5),
    "constant": lambda optimizer: ConstantLR(optimizer, 0.25, 4),
    "polynomial": lambda optimizer: PolynomialLR(optimizer, 12, 2.0),
    "one-cycle": lambda optimizer: OneCycleLR(optimizer, 2.0, total_steps=30, cycle_momentum=False),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, 1.0, 4), CosineAnnealingLR(optimizer, 12)], milestones=[4]
    ),
}


def scale_at(step: int) -> float:
    return max(0.1, 0.5 ** (step // 4))


@given(
    rate=st.floats(0, 1, allow_subnormal=False),
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("apply"), st.floats(0, 1)),
            st.tuples(st.just("again"), st.just(0.0)),
            st.tuples(st.just("schedule"), st.floats(0, 1)),
            st.tuples(st.just("restore"), st.just(0.0)),
            st.tuples(st.just("checkpoint"), st.just(0.0)),
        ),
        max_size=30,
    ),
)
# The scheduler halves the base rate at the scale 0.5: the rate is the same number, and a new base.
@example(rate=1.0, actions=[("apply", 0.5), ("schedule", 0.5), ("again", 0.0)])
def test_repeated_application_never_compounds(rate: float, actions: list[tuple[str, float]]) -> None:
    optimizer, base, scale = PlainOptimizer(rate), rate, 1.0
    for action, value in actions:
        if action == "apply":
            scale = value
            learning_rate.apply_scale(optimizer, scale)
        elif action == "again":
            learning_rate.apply_scale(optimizer, scale)
        elif action == "schedule":
            base = float.fromhex(value.hex())
            optimizer.param_groups[0]["lr"] = base
        elif action == "restore":
            learning_rate.restore_base(optimizer)
            assert optimizer.param_groups[0]["lr"] == base
        else:
            loaded = PlainOptimizer()
            loaded.param_groups = torch.load(saved(optimizer.param_groups), weights_only=True)
            optimizer = loaded
        assert learning_rate.base_learning_rates(optimizer) == [base]
    learning_rate.apply_scale(optimizer, scale)
    assert optimizer.param_groups[0]["lr"] == base * scale


def saved(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("name", SCHEDULERS)
def test_rate_after_any_torch_scheduler_is_base_times_scale(name: str) -> None:
    plain, scaled = sgd(groups=3), sgd(groups=3)
    plain_scheduler, scaled_scheduler = SCHEDULERS[name](plain), SCHEDULERS[name](scaled)
    for step in range(12):
        learning_rate.apply_scale(scaled, scale_at(step))
        expected = [rate * scale_at(step) for rate in rates(plain)]
        assert learning_rate.applied_learning_rates(scaled) == pytest.approx(expected, rel=1e-12)
        assert rates_in_step(scaled) == pytest.approx(expected, rel=1e-12)
        plain.step()
        plain_scheduler.step()
        scaled_scheduler.step()


def rates(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def rates_in_step(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rates that a step of the optimizer reads."""
    found: list[list[float]] = []
    handle = optimizer.register_step_pre_hook(lambda of, *_: found.append(rates(of)))
    optimizer.step()
    handle.remove()
    return found[0]


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_skipped_optimizer_step_does_not_compound() -> None:
    # A gradient scaler skips the optimizer's step; the scheduler multiplies the rate in the group.
    plain, scaled = sgd(1.0), sgd(1.0)
    schedulers = [ExponentialLR(optimizer, 0.9) for optimizer in (plain, scaled)]
    for step in range(8):
        learning_rate.apply_scale(scaled, 0.5)
        assert learning_rate.base_learning_rates(scaled) == pytest.approx(rates(plain), rel=1e-12)
        for optimizer, scheduler in zip((plain, scaled), schedulers, strict=True):
            if step % 2:
                optimizer.step()
            scheduler.step()


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_load_apply_and_scheduler_step_does_not_compound() -> None:
    first = sgd(1.0)
    scheduler = ExponentialLR(first, 0.9)
    learning_rate.apply_scale(first, 0.5)
    first.step()
    scheduler.step()
    resumed = sgd(1.0)
    later = ExponentialLR(resumed, 0.9)
    resumed.load_state_dict(first.state_dict())
    later.load_state_dict(scheduler.state_dict())
    learning_rate.apply_scale(resumed, 0.5)
    later.step()
    learning_rate.apply_scale(resumed, 0.5)
    assert learning_rate.applied_learning_rates(resumed) == pytest.approx([0.5 * 0.81])


def test_every_optimizer_step_until_the_next_call_is_scaled() -> None:
    optimizer = sgd(1.0)
    parameter = optimizer.param_groups[0]["params"][0]
    learning_rate.apply_scale(optimizer, 0.25)
    for _ in range(3):
        optimizer.step()
    assert parameter.tolist() == [1 - 3 * 0.25] * 2
    assert learning_rate.applied_scales(optimizer) == [0.25]


def test_tensor_rate_is_changed_in_place() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=rate, capturable=False, foreach=False)
    same = optimizer.param_groups[0]["lr"]
    for _ in range(3):
        learning_rate.apply_scale(optimizer, 0.3)
    assert optimizer.param_groups[0]["lr"] is same
    assert float(same) == pytest.approx(0.03, rel=1e-6)
    learning_rate.restore_base(optimizer)
    assert float(same) == pytest.approx(0.1, rel=1e-7)


@pytest.mark.parametrize("after_step", [True, False])
def test_resumed_optimizer_keeps_its_base(after_step: bool) -> None:
    optimizer = sgd(1.0, groups=2)
    learning_rate.apply_scale(optimizer, 0.5)
    if after_step:
        optimizer.step()
    state = torch.load(saved(optimizer.state_dict()), weights_only=True)
    resumed = sgd(123.0, groups=2)
    resumed.load_state_dict(state)
    learning_rate.apply_scale(resumed, 0.25)
    assert rates_in_step(resumed) == [0.25, 0.125]
    assert learning_rate.base_learning_rates(resumed) == [1.0, 0.5]


def test_copied_optimizer_gets_its_own_hooks() -> None:
    optimizer = sgd(1.0)
    scheduler = ExponentialLR(optimizer, 0.5)
    learning_rate.apply_scale(optimizer, 0.5)
    copied = copy.deepcopy(optimizer)
    learning_rate.apply_scale(copied, 0.5)
    assert rates_in_step(copied) == [0.5]
    assert rates(copied) == [1.0]
    del scheduler


def test_wrapped_torch_optimizer_is_scaled() -> None:
    inner = sgd(1.0)
    scheduler: LRScheduler = ExponentialLR(inner, 0.5)
    wrapper = Wrapper(inner)
    for step in range(4):
        learning_rate.apply_scale(wrapper, 0.5)
        assert rates_in_step(inner) == [0.5**step * 0.5]
        scheduler.step()


class Container(torch.optim.Optimizer):
    """Optimizers whose container has param groups of its own, as torchtitan's OptimizersContainer has."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = list(optimizers)
        groups = (group for each in optimizers for group in each.param_groups)
        super().__init__([parameter for group in groups for parameter in group["params"]], {"lr": 1.0})

    def step(self, closure: Any = None) -> Any:
        for each in self.optimizers:
            each.step()


class Wrapper:
    """An optimizer around another, with the same param groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups


@pytest.mark.parametrize("wrap", [lambda container: container, Wrapper], ids=["bare", "wrapped"])
def test_optimizers_in_a_container_are_scaled(wrap: Any) -> None:
    inner = [sgd(1.0), sgd(0.5)]
    schedulers = [ExponentialLR(each, 0.5) for each in inner]
    container = Container(*inner)
    optimizer = wrap(container)
    for step in range(4):
        bases = [0.5**step, 0.5 * 0.5**step]
        assert learning_rate.apply_scale(optimizer, 0.1)
        assert learning_rate.base_learning_rates(optimizer) == bases
        assert learning_rate.applied_learning_rates(optimizer) == pytest.approx([base * 0.1 for base in bases])
        assert learning_rate.applied_scales(optimizer) == [0.1, 0.1]
        parameters = [each.param_groups[0]["params"][0] for each in inner]
        before = [parameter.tolist()[0] for parameter in parameters]
        container.step()
        moved = [start - parameter.tolist()[0] for start, parameter in zip(before, parameters, strict=True)]
        assert moved == pytest.approx([base * 0.1 for base in bases], rel=1e-5)
        for scheduler in schedulers:
            scheduler.step()
    learning_rate.restore_base(optimizer)
    assert rates(inner[0]) == [0.5**4]


def test_container_that_cannot_be_read_is_left_alone_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    container: Any = PlainOptimizer(1.0)
    container.optimizers = {"actor": sgd(1.0)}
    assert [learning_rate.apply_scale(container, 0.1) for _ in range(2)] == [False, False]
    assert container.param_groups == [{"lr": 1.0}]
    assert learning_rate.applied_scales(container) == [1.0]
    assert len(caplog.records) == 1
    assert "PlainOptimizer has `optimizers` without param groups" in caplog.text


@pytest.mark.parametrize("scale", [-0.1, math.nan, math.inf])
def test_invalid_scale_is_refused_and_nothing_is_written(scale: float) -> None:
    optimizer = PlainOptimizer(1.0)
    with pytest.raises(ValueError, match="finite number"):
        learning_rate.apply_scale(optimizer, scale)
    assert optimizer.param_groups == [{"lr": 1.0}]


def test_a_trainer_imports_no_torch() -> None:
    program = (
        "import sys, foreshock, foreshock.learning_rate, foreshock.client, foreshock.commands.main\n"
        "foreshock.Client, foreshock.AdviceFeed, foreshock.apply_scale, foreshock.learning_rate.restore_base\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
