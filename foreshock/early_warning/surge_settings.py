"""The constants of the surge detector, each with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SurgeSettings:
    """The constants of the detector.

    They come from the published description of two runs, from the definition of the surge step and from generated
    curves (`benchmarks/detector`); recorded runs only judge them.
    """

    growth: float = 2.0
    """Crossing, as a multiple of the baseline (the definition of the surge step)."""
    average_run_length: float = 1e5
    """Observations between false alarms, on average at least, if the noise is as estimated: at most one in 250 healthy
    runs of 400 observations has a false surge."""
    window_fraction: float = 0.25
    """Growth window / step. A surge at 110 takes some tens of steps, one at 1,500 (ten times lower learning rate)
    correspondingly more: steepness scales with the step."""
    minimum_window: int = 12
    """Steps. A run that doubled over 10-13 steps (8 to 21) surged, one that took 21 (14 to 35) ramped and improved."""
    maximum_window: int = 100
    """Steps. Slower doublings are ramps at any step."""
    baseline_values: int = 5
    """Values that a baseline needs at least: the median of five is the shortest that tolerates two outliers."""
    confirmation_values: int = 4
    """Values that a crossing must hold at least: the median of four tolerates one outlier."""
    abandoning_values: int = 3
    """Values after which a crossing is abandoned if its median has fallen back."""
    maximum_crossing_values: int = 40
    """A crossing that has too little evidence after so many values is noise that the baseline does not describe."""
    least_noise: float = 0.03
    """The smallest standard deviation of the innovations of log lengths: the mean over 1,000 responses whose length
    has a standard deviation as large as its mean."""
    noise_values: int = 100
    """The newest values before the growth window that the noise is estimated from."""
    rise_z: float = 4.5
    """A crossing must be so many standard deviations of the wander of the series above the baseline: strongly
    autocorrelated noise doubles by itself."""
    drift_values: int = 60
    """Values before the baseline from which a steady drift is known: the lengths must double beyond it."""
    largest_drift: float = math.log(1.5)
    """Log growth that is taken for drift at most: a drift that is steeper is part of the surge."""
    early_surge_step: int = 20
    """Surges up to this step need corroboration: many real runs change length at steps 5-20 and stay healthy."""
    corroboration_steps: int = 50
    """Steps after its confirmation within which an early surge, or one with a rising reward, can be corroborated."""
    quiet_steps: int = 50
    """Steps after a confirmed surge without another detection, so that one steep rise is one surge."""
    smoothing_values: int = 5
    """Values in the running median of levels, ramps and the high-water mark."""
    reward_z: float = 3.0
    """The reward rises with the lengths if its rise is so many standard deviations of the difference of two means."""
    truncated_at_cap: float = 0.5
    """Truncated fraction from which the mean length is the cap and shows no growth."""
    capped_values: int = 2
    """Values at the cap in a row that disarm the detector: one may be the surge itself."""
    fraction_of_cap: float = 0.9
    """A mean length beyond this fraction of a known cap is at the cap."""

    def window(self, step: int) -> int:
        """Return the steps within which the length must double at ``step``."""
        return min(max(int(self.window_fraction * step), self.minimum_window), self.maximum_window)

    @property
    def log_growth(self) -> float:
        return math.log(self.growth)

    @property
    def kept_values(self) -> int:
        """Values that are kept at any distance of their steps."""
        return 64
