"""A torch scheduler that follows the advice, alone or around another scheduler. Importing this imports torch."""

from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from foreshock.learning_rate.apply import applied_learning_rates, restore_base, write_scale

__all__ = ["ForeshockLR", "HasScale"]


class HasScale(Protocol):
    """The required part of an AdviceFeed; `acknowledge`, `state_dict` and `load_state_dict` are optional."""

    def scale(self, step: int) -> float:
        """Return the learning-rate factor of training step `step`."""


class ForeshockLR(LRScheduler):
    """The learning rates of `scheduler` times the advised scale.

    Wrap the outermost scheduler and step only this one, as often as the wrapped one was stepped:

        scheduler = ForeshockLR(optimizer, feed, CosineAnnealingLR(optimizer, T_max=1000))

    `advice` is an AdviceFeed, or any function of the training step. The training step is `first_step` plus the
    number of `step()` calls divided by `steps_per_training_step` (optimizer steps in one training step), or the result
    of `training_step()` if that function is given.

    The base learning rates are restored before each step of `scheduler`, so that schedulers which multiply the rate in
    the param group do not compound. The applied rate is reported to the service in the background. `state_dict` holds
    the state of the wrapped scheduler and of the feed. `get_last_lr` and the param groups show the scaled rates.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        advice: HasScale | Callable[[int], float],
        scheduler: LRScheduler | None = None,
        *,
        first_step: int = 1,
        steps_per_training_step: int = 1,
        training_step: Callable[[], int] | None = None,
    ) -> None:
        if scheduler is not None and scheduler.optimizer is not optimizer:
            raise ValueError(
                "the wrapped scheduler belongs to another optimizer; pass the optimizer that it was created with"
            )
        if steps_per_training_step < 1:
            raise ValueError(f"steps_per_training_step must be at least 1, got {steps_per_training_step!r}")
        # LRScheduler.__init__ is not called: its initial step would count as a training step.
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.advice = advice
        self.first_step = first_step
        self.steps_per_training_step = steps_per_training_step
        self.last_epoch = 0
        self.base_lrs = list(getattr(scheduler, "base_lrs", applied_learning_rates(optimizer)))
        self._training_step = training_step
        self._step_count = 1
        self._apply()

    def training_step(self) -> int:
        """Return the training step whose learning rate is in the param groups now."""
        if self._training_step is not None:
            return self._training_step()
        return self.first_step + self.last_epoch // self.steps_per_training_step

    def step(self, epoch: Any = None, **keywords: Any) -> None:
        """Step the wrapped scheduler with the same arguments (such as `metrics`), then apply the scale."""
        restore_base(self.optimizer)
        if self.scheduler is not None:
            self.scheduler.step(*(() if epoch is None else (epoch,)), **keywords)
        self.last_epoch += 1
        self._step_count += 1
        self._apply()

    def get_lr(self) -> list[Any]:
        """Return the scaled learning rates, one per param group."""
        return list(applied_learning_rates(self.optimizer))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped scheduler and of the feed, and the number of steps taken."""
        save = getattr(self.advice, "state_dict", None)
        return {
            "last_epoch": self.last_epoch,
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "advice": save() if save is not None else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load `state_dict()`, before or after the optimizer's own: both orders give the same rates."""
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = self.last_epoch + 1
        if self.scheduler is not None and state_dict.get("scheduler") is not None:
            self.scheduler.load_state_dict(state_dict["scheduler"])
        load = getattr(self.advice, "load_state_dict", None)
        if load is not None and state_dict.get("advice") is not None:
            load(state_dict["advice"])
        self._apply()

    def _apply(self) -> None:
        step = self.training_step()
        scale_of: Any = getattr(self.advice, "scale", self.advice)
        scale = float(scale_of(step))
        written = write_scale(self.optimizer, scale)
        self._last_lr: list[Any] = self.get_lr()
        acknowledge = getattr(self.advice, "acknowledge", None)
        if written and acknowledge is not None and self._last_lr:
            acknowledge(step, max(self._last_lr), scale)
