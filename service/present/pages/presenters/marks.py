"""The presenter of marks in curves: steps of alerts, resumes, and the surge and decays of the learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from foreshock_service.platform.database.tables import Run
from foreshock_service.present.pages.figures.changes import Band, Mark
from foreshock_service.present.pages.presenters.advice import Scale, advice_of
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.runs.attempts.service import attempts_of_run
from foreshock_service.watch.alerts.schemas import AlertState
from foreshock_service.watch.alerts.service import list_alerts

MOST_BANDS = 30
MOST_DECAYS = 8
_SHOWN: tuple[AlertState, ...] = ("open", "acknowledged", "resolved")


def bands_of(viewing: Viewing, run: Run) -> list[Band]:
    """Return the steps of the newest alerts, warnings and critical ones: from the alert to where its rule cleared."""
    found = list_alerts(viewing.session, viewing.principal, run.id, _SHOWN, None, MOST_BANDS).items
    last = run.last_step or 0
    bands = [
        Band(alert.step, last if alert.cleared_step is None else alert.cleared_step, alert.severity)
        for alert in found
        if alert.severity != "info"
    ]
    return disjoint(bands)


def disjoint(bands: Sequence[Band]) -> list[Band]:
    """Return the same steps as bands that do not overlap, in order, each with the worst severity of its steps.

    Bands are drawn translucent: a dozen of them above each other would hide the curve.
    """
    edges = sorted({edge for band in bands for edge in (band.first, max(band.last, band.first + 1))})
    found: list[Band] = []
    for first, last in pairwise(edges):
        here = [band.severity for band in bands if band.first <= first and max(band.last, band.first + 1) >= last]
        if not here:
            continue
        worst = "critical" if "critical" in here else here[0]
        if found and found[-1].last == first and found[-1].severity == worst:
            found[-1] = Band(found[-1].first, last, worst)
        else:
            found.append(Band(first, last, worst))
    return found


def named_marks(viewing: Viewing, run: Run) -> list[Mark]:
    """Return where attempts resumed, the length surge, and the decays that it led to so far."""
    marks = [Mark(each.resume_step, f"attempt {each.attempt}") for each in attempts_of_run(viewing.session, run.id)[1:]]
    advice = advice_of(viewing, run.id)
    if advice.schedule is not None:
        marks.append(Mark(advice.schedule.surge_step, "surge"))
    if advice.observed_step is not None:
        stairs = Scale.of(advice).stairs(advice.observed_step)
        marks += [Mark(step, f"× {scale:g}") for step, scale in stairs if 0 < step <= advice.observed_step][
            -MOST_DECAYS:
        ]
    return marks
