"""Whether lengths that have doubled are a surge or a ramp: how steep the doubling is."""

import math
from bisect import bisect_left

from foreshock.diagnosis.statistics import Noise
from foreshock.diagnosis.surge_state import Crossing, SurgeSettings, SurgeState


def is_steep(state: SurgeState, crossing: Crossing, noise: Noise, settings: SurgeSettings) -> bool:
    """Return whether the lengths have doubled faster than a ramp could, beyond the noise.

    The newest values, at most those since the crossing, are compared with every earlier stretch of values. The
    difference of the two means must be a doubling, and exceed what a ramp of the largest rate makes of the distance of
    their centres by some standard errors.
    """
    since = len(crossing.since)
    rate = settings.ramp_rate * min(1.0, settings.late_step / crossing.step)
    # Values at a cap are known to the crossing only.
    known = bisect_left(state.steps, crossing.rising_steps[0])
    steps, values = (*state.steps[:known], *crossing.rising_steps), (*state.values[:known], *crossing.rising)
    count = len(values)
    sums, places = [0.0], [0]
    for step, value in zip(steps, values, strict=True):
        sums.append(sums[-1] + value)
        places.append(places[-1] + step)
    for after in range(2, since + 1, 2):
        mean = (sums[count] - sums[count - after]) / after
        centre = (places[count] - places[count - after]) / after
        of_after = noise.deviation_of_mean(after)
        for before in STEADY_VALUES:
            error = math.hypot(of_after, noise.deviation_of_mean(before))
            for end in range(count - after, before - 1, -1):
                risen = mean - (sums[end] - sums[end - before]) / before
                distance = centre - (places[end] - places[end - before]) / before
                if distance > settings.maximum_window:
                    break
                margin = risen - rate * distance
                if risen >= settings.log_growth and margin >= settings.steep_z * error:
                    return True
    return False


STEADY_VALUES = (2, 5, 10, 20)
"""Values of an earlier stretch: few for an early surge or sparse steps, many for noisy lengths."""
