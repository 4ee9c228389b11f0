"""Which steps keep their tokens: a pure function of the steps, the alerts and the rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """Tokens of the newest `last_steps` steps, of each `every_steps`-th one, and of those around alerts are kept.

    `last_steps` None: all tokens are kept. `every_steps` None: none is kept for its number. `alert_steps` before and
    after the step of an alert are kept, and that step itself.
    """

    last_steps: int | None = None
    every_steps: int | None = None
    alert_steps: int = 2

    def keeps(self, step: int, newest: int, alert_steps: Iterable[int]) -> bool:
        """Return whether the tokens of `step` are kept in a run whose newest step is `newest`."""
        if self.last_steps is None or step > newest - self.last_steps:
            return True
        if self.every_steps is not None and step % self.every_steps == 0:
            return True
        return any(abs(step - alert) <= self.alert_steps for alert in alert_steps)


def purged_steps(steps: Iterable[int], newest: int, alerts: Iterable[int], rules: RetentionRules) -> list[int]:
    """Return those of the steps whose tokens are not kept, in their order."""
    near = sorted({alert + offset for alert in alerts for offset in range(-rules.alert_steps, rules.alert_steps + 1)})
    kept = frozenset(near)
    return [step for step in steps if step not in kept and not rules.keeps(step, newest, ())]
