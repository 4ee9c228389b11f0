"""Do 95 % intervals of mean k3 hold the truth for few, uneven or heavy-tailed groups? `make bench-uneven-groups`

A cell of the grid: 8, 32 or 128 prompt groups; |d| of a prompt scaled by exp(σ·z), σ = 0, 0.3, 0.6, 0.8; d of a token a
hundredth of Student's t with 30, 5 or 3 degrees of freedom; with or without hot tokens (one in 1,000, 30 times larger,
about half of k3); 16 rollouts a group or 1 to 96. Rollouts have 8 to 1,000 tokens and |d| is at most 3. The rollouts of
a group are a run of a shuffled population of 16,384 rollouts, and z has 35 values; so the true mean is a finite sum.

Three intervals: Student's t, the bootstrap-t, and the one that this project reports (the bootstrap-t with an upper end
from the spread of the groups, `nonnegative_intervals`). They are computed for all batches of a cell at once;
tests/benchmarks/test_uneven_groups.py compares them with the product's. For a part of the batches k̂ of d is computed
too, and with it the product's verdict whether the interval is reliable.

`--window`: the same for the first figure of a run, pooled over ten steps of 8, 32 or 128 even groups. Its clusters are
prompt × step, and its k̂ is the median of the steps'.

Bar: the reported interval covers at least 90 %, within two standard errors, in every cell where at least a tenth of the
batches is called reliable, all its batches taken together; and so do those called reliable. `--quick` takes 200 batches
a cell instead of 2,000.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from foreshock.diagnosis.diagnose import NEWEST_STEPS as WINDOW_STEPS
from foreshock.measures.estimators.bootstrap import MORE_RESAMPLES, RESAMPLES
from foreshock.measures.estimators.bootstrap import SEED as BOOTSTRAP_SEED
from foreshock.measures.estimators.intervals import student_t_quantile
from foreshock.measures.estimators.pareto import tail_shapes as product_shapes
from foreshock.measures.estimators.reliability import interval_is_reliable
from foreshock.measures.estimators.uneven_groups import high_from_spread

Float64 = NDArray[np.float64]
Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
Bounds = tuple[Float64, Float64]

SEED = 20261122
GROUPS = (8, 32, 128)
SCALES = (0.0, 0.3, 0.6, 0.8)
DEGREES = (30, 5, 3)
KINDS = ("student", "bootstrap", "reported")
LEAST_COVERAGE = 0.9
LEAST_RELIABLE = 0.1
BATCHES, QUICK_BATCHES, WINDOW_BATCHES = 2000, 200, 400
WITH_TAILS, QUICK_WITH_TAILS, WINDOW_WITH_TAILS = 200, 20, 10

_POPULATION = 1 << 14
_MOST_ROLLOUTS = 96
_UNIT, _LARGEST_D = 0.01, 3.0
_HOT_FRACTION, _HOT_FACTOR = 0.001, 30.0
# z of a prompt is rounded to fifths, up to ±3.4.
Z = np.arange(-17, 18) / 5.0


@dataclass(frozen=True, slots=True)
class Population:
    """Rollouts without a prompt's scale: tokens t [T] (d = 0.01·scale·t), cut at `offsets` [N + 1]; it is cyclic."""

    t: Float32
    offsets: Int64

    @property
    def rollouts(self) -> int:
        """The number of rollouts before the repeated ones."""
        return _POPULATION

    @classmethod
    def of(cls, degrees: int, hot: bool) -> Population:
        """Draw one; its last rollouts repeat the first, so that any run of rollouts is a slice."""
        random = np.random.default_rng([SEED, degrees, int(hot)])
        lengths = np.clip(np.rint(np.exp(random.normal(math.log(120.0), 0.6, _POPULATION))), 8, 1000).astype(np.int64)
        t = random.standard_t(degrees, int(lengths.sum())).astype(np.float32)
        if hot:
            t[random.random(t.size) < _HOT_FRACTION] *= _HOT_FACTOR
        repeated = lengths[:_MOST_ROLLOUTS]
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([lengths, repeated]))])
        return cls(np.concatenate([t, t[: repeated.sum()]]), offsets)

    def d(self, tokens: slice, scale: float) -> Float32:
        """Return d of some tokens at a prompt's scale."""
        return np.clip(self.t[tokens] * np.float32(_UNIT * scale), -_LARGEST_D, _LARGEST_D)

    def cumulated_k3(self, scale: float) -> Float64:
        """Return Σ k3 of all rollouts before each, [N + 1], at a prompt's scale."""
        d = self.d(slice(None), scale).astype(np.float64)
        return np.concatenate([[0.0], np.cumsum(np.add.reduceat(np.expm1(d) - d, self.offsets[:-1]))])


@dataclass(frozen=True, slots=True)
class Batches:
    """B batches of G groups: Σ k3 and tokens of each, [B, G], and their origin."""

    sums: Float64
    tokens: Float64
    places: Int64
    first: Int64
    rollouts: Int64


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: coverage of each of KINDS, and of the batches with k̂ which are reliable and which hold the truth."""

    groups: int
    scale: float
    degrees: int
    hot: bool
    uneven: bool
    batches: int
    coverage: dict[str, float]
    widths: dict[str, float]
    effective: float
    reliable: NDArray[np.bool_]
    held: NDArray[np.bool_]

    @property
    def reliable_share(self) -> float:
        """The share of batches whose interval is called reliable."""
        return float(self.reliable.mean())

    @property
    def reliable_coverage(self) -> float:
        """The coverage of these; NaN if there is none."""
        return float(self.held[self.reliable].mean()) if self.reliable.any() else math.nan

    @property
    def reached(self) -> bool:
        """True if the bar is reached within two binomial errors, or if hardly any batch is called reliable."""
        if self.reliable_share < LEAST_RELIABLE:
            return True
        counts = ((self.coverage["reported"], self.batches), (self.reliable_coverage, int(self.reliable.sum())))
        return all(covered >= LEAST_COVERAGE - 2.0 * _error(LEAST_COVERAGE, count) for covered, count in counts)


def _error(share: float, count: int) -> float:
    return math.sqrt(share * (1.0 - share) / count)


def z_probabilities() -> Float64:
    """Return the probability of each of the 35 values of z, a normal deviate rounded to fifths, [35]."""
    edges = [-math.inf, *((Z[1:] + Z[:-1]) / 2.0), math.inf]
    return np.diff([0.5 * (1.0 + math.erf(edge / math.sqrt(2.0))) for edge in edges])


def scales_of(scale: float) -> Float64:
    """Return the factors of |d| of a prompt for each z at the log-sd `scale`; one factor without any."""
    return np.exp(scale * Z) if scale else np.ones(1)


def expectation(table: Float64, scale: float) -> float:
    """Return the sum of the whole population, expected over the prompts' z, from a table [scales, N + 1]."""
    weights = z_probabilities() if scale else np.ones(1)
    return float(weights @ table[:, _POPULATION])


def draw(
    tables: Float64, offsets: Int64, count: int, groups: int, uneven: bool, random: np.random.Generator
) -> Batches:
    """Draw batches from the cumulated Σ k3 of each scale, [scales, N + 1]."""
    shape = (count, groups)
    places = np.clip(np.rint(random.normal(size=shape) * 5.0), -17, 17).astype(np.int64) + 17
    first = random.integers(0, _POPULATION, shape)
    rollouts = np.full(shape, 16)
    if uneven:
        drawn = np.rint(16.0 * np.exp(random.normal(-0.3, 0.8, shape)))
        rollouts = np.clip(drawn, 1, _MOST_ROLLOUTS).astype(np.int64)
    rows = np.minimum(places, len(tables) - 1)
    sums = tables[rows, first + rollouts] - tables[rows, first]
    tokens = (offsets[first + rollouts] - offsets[first]).astype(np.float64)
    return Batches(sums, tokens, places, first, rollouts)


def all_intervals(sums: Float64, tokens: Float64, resamples: int = RESAMPLES) -> dict[str, Bounds]:
    """Return the ends, each [B], of KINDS for B batches of G groups, [B, G]; vectorised over batches."""
    groups = sums.shape[1]
    totals = tokens.sum(axis=1)
    means = sums.sum(axis=1) / totals
    residuals = sums - means[:, None] * tokens
    errors = np.sqrt(np.square(residuals).sum(axis=1)) / totals
    reach = student_t_quantile(0.975, groups - 1) * errors * math.sqrt(groups / (groups - 1))
    drawn = np.random.default_rng(BOOTSTRAP_SEED).integers(0, groups, (resamples, groups))
    weights = np.stack([np.bincount(row, minlength=groups) for row in drawn]).astype(np.float64)
    total = weights @ tokens.T
    shift = (weights @ residuals.T) / total
    of_squares, shifted = weights @ np.square(residuals).T, np.square(shift) * (weights @ np.square(tokens).T)
    squares = of_squares - 2.0 * shift * (weights @ (residuals * tokens).T) + shifted
    squares[squares <= 1e-12 * (of_squares + shifted)] = 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        studentised = np.sort(np.where(shift == 0.0, 0.0, shift * total / np.sqrt(squares)), axis=0)
    rank = (resamples + 1) // 40  # 25 of 999
    below, above = studentised[rank - 1], studentised[resamples - rank]
    low, high = np.maximum(means - above * errors, 0.0), means - below * errors
    spread = np.array([high_from_spread(s[:, None], t)[0] for s, t in zip(sums, tokens, strict=True)])
    return {
        "student": (means - reach, means + reach),
        "bootstrap": (low, high),
        "reported": (low, np.fmax(high, spread)),
    }


def tail_shapes(
    population: Population, scales: Float64, batches: Batches, index: int, steps: int = 1
) -> tuple[float, float]:
    """Return k̂ of ρ and of 1/ρ of one batch, from its tokens, as the product computes them: the medians over steps."""
    parts = [np.array_split(values[index], steps) for values in (batches.places, batches.first, batches.rollouts)]
    shapes = [_tail_shapes(population, scales, *step) for step in zip(*parts, strict=True)]
    return float(np.median([shape[0] for shape in shapes])), float(np.median([shape[1] for shape in shapes]))


def _tail_shapes(
    population: Population, scales: Float64, places: Int64, firsts: Int64, counts: Int64
) -> tuple[float, float]:
    runs = zip(places, firsts, counts, strict=True)
    d = np.concatenate(
        [
            population.d(slice(population.offsets[first], population.offsets[first + rollouts]), float(scales[place]))
            for place, first, rollouts in runs
        ]
    )
    return product_shapes(d)


def cells(count: int, with_tails: int, steps: int = 1) -> Iterator[Cell]:
    """Run the grid with `count` batches a cell, k̂ of `with_tails` of them; a batch pools `steps` steps."""
    shapes_of_grid = product(GROUPS, (False, True)) if steps == 1 else product(GROUPS, (False,))
    grid = [(steps * groups, uneven) for groups, uneven in shapes_of_grid]
    resamples = RESAMPLES if steps == 1 else MORE_RESAMPLES
    for degrees, hot in product(DEGREES, (False, True)):
        population = Population.of(degrees, hot)
        for scale in SCALES:
            scales = np.exp(scale * Z)
            tables = np.stack([population.cumulated_k3(float(value)) for value in scales_of(scale)])
            truth = expectation(tables, scale) / float(population.offsets[_POPULATION])
            for groups, uneven in grid:
                random = np.random.default_rng([SEED, degrees, int(hot), round(10 * scale), groups, int(uneven)])
                batches = draw(tables, population.offsets, count, groups, uneven, random)
                found = all_intervals(batches.sums, batches.tokens, resamples)
                held = {kind: (low <= truth) & (truth <= high) for kind, (low, high) in found.items()}
                shapes = [tail_shapes(population, scales, batches, index, steps) for index in range(with_tails)]
                effective = np.square(batches.sums.sum(axis=1)) / np.square(batches.sums).sum(axis=1)
                yield Cell(
                    groups=groups,
                    scale=scale,
                    degrees=degrees,
                    hot=hot,
                    uneven=uneven,
                    batches=count,
                    coverage={kind: float(values.mean()) for kind, values in held.items()},
                    widths={kind: float(np.median(high - low)) / truth for kind, (low, high) in found.items()},
                    effective=float(np.median(effective)),
                    reliable=np.array([interval_is_reliable(groups, *pair) for pair in shapes]),
                    held=held["reported"][:with_tails],
                )


def print_table(found: list[Cell]) -> None:
    """One line a cell: coverage and median width over the truth of each kind, and what is called reliable."""
    print("groups  σ   ν hot rollouts  effective   Student t      bootstrap-t    reported       reliable  then covers")
    for cell in sorted(found, key=lambda cell: (cell.groups, cell.scale, -cell.degrees, cell.hot, cell.uneven)):
        kinds = "  ".join(f"{cell.coverage[kind]:6.1%} {cell.widths[kind]:6.2f}" for kind in KINDS)
        rest = "     –" if math.isnan(cell.reliable_coverage) else f"{cell.reliable_coverage:6.1%}"
        print(
            f"{cell.groups:6d} {cell.scale:.1f} {cell.degrees:3d} {'yes' if cell.hot else 'no ':3s} "
            f"{'1 to 96' if cell.uneven else '16     '} {cell.effective:9.1f}  {kinds}  "
            f"{cell.reliable_share:8.0%}  {rest}{'' if cell.reached else '  below the bar'}"
        )


def measure_uneven_groups(
    count: int = BATCHES, with_tails: int = WITH_TAILS, steps: int = 1
) -> dict[str, float | bool]:
    """Run the experiment, print its table, and return its figures.

    `lowest` is the reported interval's coverage over cells where at least a tenth of the batches is called reliable.
    """
    start = time.perf_counter()
    found = list(cells(count, with_tails, steps))
    print_table(found)
    judged = [cell for cell in found if cell.reliable_share >= LEAST_RELIABLE]
    finite = [cell for cell in found if cell.degrees > 4]
    return {
        "batches": count,
        "with_tails": with_tails,
        "steps": steps,
        "cells": len(found),
        "judged": len(judged),
        "lowest": min(cell.coverage["reported"] for cell in judged),
        "lowest_finite_variance": min(cell.coverage["reported"] for cell in finite),
        "lowest_of_all": min(cell.coverage["reported"] for cell in found),
        "bootstrap_lowest": min(cell.coverage["bootstrap"] for cell in finite),
        "student_lowest": min(cell.coverage["student"] for cell in finite),
        "standard_error": _error(LEAST_COVERAGE, count),
        "seconds": time.perf_counter() - start,
        "reached": all(cell.reached for cell in found),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_BATCHES} batches a cell, in under two minutes")
    parser.add_argument("--window", action="store_true", help=f"pooled over {WINDOW_STEPS} steps instead of one")
    arguments = parser.parse_args()
    sizes = (QUICK_BATCHES, QUICK_WITH_TAILS) if arguments.quick else (BATCHES, WITH_TAILS)
    if arguments.window:
        sizes = (QUICK_BATCHES if arguments.quick else WINDOW_BATCHES, WINDOW_WITH_TAILS)
    figures = measure_uneven_groups(*sizes, steps=WINDOW_STEPS if arguments.window else 1)
    texts = {name: str(value).lower() if isinstance(value, bool) else f"{value:.4g}" for name, value in figures.items()}
    print(" ".join(f"{name}={text}" for name, text in texts.items()))
    return 0 if figures["reached"] else 1


if __name__ == "__main__":
    sys.exit(main())
