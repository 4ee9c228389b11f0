"""How slow a surge may be before its lengths look like a ramp: the border, as a table over the steepness that is asked.

    python -m benchmarks.detector.slow_surges

Ramps of two to four times in 80 to 300 steps must not move the learning rate; a rise of three to four times around step
110 should. Each row is another `steep_z`, the default 3.2; seeds are the tuned ones.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.detector.curves import noise_of
from benchmarks.diagnosis.surges import moves, ramp
from foreshock.diagnosis.surge_state import SurgeSettings

STEEP_Z = (1.0, 2.0, 3.2, 4.5)
WIDTHS = (3, 5, 7, 9, 12, 15)
NOISE = ((0.10, 0.2), (0.20, 0.4))
CURVES, RAMPS = 60, 120


def main() -> int:
    """Print the table."""
    rises = " ".join(f"{4.4 * width:5.0f}" for width in WIDTHS)
    print(f"found of {CURVES}, by steps from 10 to 90 %, at noise {NOISE[0][0]:g} and then {NOISE[1][0]:g}")
    print(f"{'steep_z':>8} {f'ramps of {RAMPS}':>13}   {rises}   {rises}")
    for steep_z in STEEP_Z:
        settings = replace(SurgeSettings(), steep_z=steep_z)
        ramps = sum(moves(ramp(number, seed=7)[0], settings=settings) for number in range(RAMPS))
        found = [
            sum(moves(rise(width, seed, *noise), settings=settings) for seed in range(CURVES))
            for noise in NOISE
            for width in WIDTHS
        ]
        cells = [" ".join(f"{each:5d}" for each in part) for part in (found[: len(WIDTHS)], found[len(WIDTHS) :])]
        print(f"{steep_z:8.1f} {ramps:13d}   {cells[0]}   {cells[1]}", flush=True)
    return 0


def rise(width: int, seed: int, deviation: float, autocorrelation: float) -> NDArray[np.float64]:
    """Return lengths that rise from 1000 to 3000-4000 around step 110."""
    random = np.random.default_rng([9, seed, 10 * width])
    high, step = random.uniform(3000.0, 4000.0), np.arange(1, 231)
    lengths = 1000.0 + (high - 1000.0) / (1.0 + np.exp(-(step - 110) / width))
    return np.asarray(lengths * np.exp(noise_of(deviation, autocorrelation, len(step), random)))


if __name__ == "__main__":
    sys.exit(main())
