"""The presenter of the quantities that a run's curves can be drawn over besides the step."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from foreshock_service.platform.database.tables import Run
from foreshock_service.present.pages.presenters.curves import first_of, scalar_curves
from foreshock_service.present.pages.presenters.signals import LEARNING_RATES
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.runs.steps.service import arrival_times

_HOUR_US = 3_600_000_000


def axes_of_run(viewing: Viewing, run: Run) -> dict[str, Any]:
    """Return by axis the steps at which it is known and its values there; an axis that is not logged is absent.

    `lr`: Σ η up to the step, of the logged learning rates. `time`: hours from the first step's last shard.
    """
    axes: dict[str, Any] = {}
    rates = first_of(scalar_curves(viewing, run.id, LEARNING_RATES, max_points=None), LEARNING_RATES).points()
    if rates:
        sums = accumulate(rate for _, rate in rates)
        axes["lr"] = {"steps": [step for step, _ in rates], "values": list(sums)}
    times = arrival_times(viewing.session, run.id)
    if times:
        start = times[0][1]
        hours = accumulate(((at - start) / _HOUR_US for _, at in times), max)
        axes["time"] = {"steps": [step for step, _ in times], "values": list(hours)}
    return axes
