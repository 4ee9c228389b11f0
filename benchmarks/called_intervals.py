"""Does whatever the product calls a 95 % interval cover at least 90 %? `make bench-called-intervals`

Four kinds of interval on the grid of benchmarks/uneven_groups.py (log-sd of the prompts' |d| 0 to 0.8; Student's t with
30, 5 or 3 degrees of freedom; with and without hot tokens), 200 batches a cell, each judged by the product's own rule:

- step: k3 of one step, 8, 32 or 128 groups, even and uneven
- window: k3 pooled over ten steps of 8, 32 or 128 groups; its k̂ is the median of the steps'
- share: E[d_link·d]/E[d²] of a link with the tails of the grid beside another with normal noise
- difference: E[d²] of the one less that of the other

Shares and differences have 8, 32, 64 or 128 groups, the noise is as large as the grid's or three times larger, and has
the prompts' scale or not. Only batches whose interval is *called* a 95 % interval count.

Bar: of each kind, the batches called so cover at least 90 % together, and in every cell with at least a tenth of its
batches called so, within two standard errors. Exits 1 otherwise. `--kind` runs some of them.
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

from benchmarks.uneven_groups import (
    DEGREES,
    LEAST_COVERAGE,
    LEAST_RELIABLE,
    SCALES,
    Batches,
    Population,
    Z,
    cells,
    draw,
    expectation,
    scales_of,
)
from foreshock.diagnosis.diagnose import NEWEST_STEPS as WINDOW_STEPS
from foreshock.measures.estimators.bootstrap import bootstrap_interval
from foreshock.measures.estimators.pareto import tail_shapes
from foreshock.measures.estimators.reliability import LEAST_GROUPS_OF_SIGNED, interval_is_reliable

Float64 = NDArray[np.float64]

KINDS = ("step", "window", "share", "difference")
BATCHES = 200
SIGNED_GROUPS = (8, 32, 64, 128)
NOISES = (1.0, 3.0)
_UNIT = 0.01


@dataclass(frozen=True, slots=True)
class Called:
    """A cell: its batches, how many of them are called a 95 % interval, and how many of all and of these cover."""

    kind: str
    name: str
    batches: int
    covering: int
    called: int
    called_covering: int

    @property
    def reached(self) -> bool:
        """True if the bar is reached within two binomial errors, or if hardly any batch is called a 95 % interval."""
        if self.called < LEAST_RELIABLE * self.batches:
            return True
        error = math.sqrt(LEAST_COVERAGE * (1.0 - LEAST_COVERAGE) / self.called)
        return self.called_covering / self.called >= LEAST_COVERAGE - 2.0 * error


def of_k3(kind: str) -> Iterator[Called]:
    """Yield the cells of k3 of one step, or pooled over a window."""
    for cell in cells(BATCHES, BATCHES, steps=WINDOW_STEPS if kind == "window" else 1):
        name = f"{cell.groups:5d} groups{' uneven' if cell.uneven else ''} σ {cell.scale} ν {cell.degrees}"
        yield Called(
            kind, name + (" hot" if cell.hot else ""), BATCHES, int(cell.held.sum()), int(cell.reliable.sum()),
            int(cell.held[cell.reliable].sum()),
        )  # fmt: skip


def of_signed() -> Iterator[Called]:
    """Yield the cells of shares and of differences, which come from the same batches."""
    for degrees, hot, noise, scale, scaled in product(DEGREES, (False, True), NOISES, SCALES, (True, False)):
        population, scales = Population.of(degrees, hot), np.exp(scale * Z)
        other = np.random.default_rng([degrees, int(hot)]).standard_normal(population.t.size) * _UNIT * noise
        of_scales = [_sums(population, other, each, scaled) for each in scales_of(scale).tolist()]
        tables = [np.stack(each) for each in zip(*of_scales, strict=True)]
        of_link, of_whole, of_difference = (expectation(table, scale) for table in tables)
        tokens = float(population.offsets[population.rollouts])
        truths = {"share": of_link / of_whole, "difference": of_difference / tokens}
        for groups in SIGNED_GROUPS:
            seed = [degrees, int(hot), round(10 * scale), groups]
            drawn = [
                draw(table, population.offsets, BATCHES, groups, False, np.random.default_rng(seed)) for table in tables
            ]
            called = np.zeros(BATCHES, bool)
            if groups >= LEAST_GROUPS_OF_SIGNED:
                called = np.array([_reliable(population, scales, drawn[0], row) for row in range(BATCHES)])
            for kind, (sums, sizes) in {
                "share": (drawn[0].sums, drawn[1].sums),
                "difference": (drawn[2].sums, drawn[2].tokens),
            }.items():
                found = [bootstrap_interval(*row) for row in zip(sums, sizes, strict=True)]
                held = np.array([each.low <= truths[kind] <= each.high for each in found])
                name = f"{groups:5d} groups σ {scale} ν {degrees}{' hot' if hot else ''} noise {noise}"
                yield Called(
                    kind, name + (" scaled" if scaled else ""), BATCHES, int(held.sum()), int(called.sum()),
                    int(held[called].sum()),
                )  # fmt: skip


def _sums(population: Population, other: Float64, scale: float, scaled: bool) -> list[Float64]:
    """Return Σ of d_link·d, of d² and of d_link² − d_other² before each rollout, [N + 1] each, at a prompt's scale."""
    link = population.d(slice(None), scale).astype(np.float64)
    noise = other * (scale if scaled else 1.0)
    whole = link + noise
    terms = (link * whole, np.square(whole), np.square(link) - np.square(noise))
    return [np.concatenate([[0.0], np.cumsum(np.add.reduceat(term, population.offsets[:-1]))]) for term in terms]


def _reliable(population: Population, scales: Float64, batches: Batches, row: int) -> bool:
    """Return the product's verdict from the tails of the link, which are the heavier ones."""
    runs = zip(batches.places[row], batches.first[row], batches.rollouts[row], strict=True)
    d = np.concatenate(
        [
            population.d(slice(population.offsets[first], population.offsets[first + count]), float(scales[place]))
            for place, first, count in runs
        ]
    )
    return interval_is_reliable(batches.places.shape[1], *tail_shapes(d.astype(np.float64)))


def print_cells(found: list[Called]) -> None:
    """Print a line a cell of which any batch is called a 95 % interval."""
    for cell in found:
        if cell.called:
            print(
                f"{cell.kind:10s} {cell.name:45s} all {cell.covering / cell.batches:6.1%}  called "
                f"{cell.called / cell.batches:4.0%}  these {cell.called_covering / cell.called:6.1%}"
                f"{'' if cell.reached else '  below the bar'}",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=KINDS, help="only these kinds")
    kinds = parser.parse_args().kind
    start, texts, reached = time.perf_counter(), [], True
    signed = list(of_signed()) if {"share", "difference"} & set(kinds) else []
    for kind in kinds:
        found = list(of_k3(kind)) if kind in ("step", "window") else [cell for cell in signed if cell.kind == kind]
        print_cells(found)
        called, covering = sum(cell.called for cell in found), sum(cell.called_covering for cell in found)
        judged = [cell for cell in found if cell.called >= LEAST_RELIABLE * cell.batches]
        lowest = min((cell.called_covering / cell.called for cell in judged), default=math.nan)
        rest = sum(cell.covering for cell in found) - covering
        others = sum(cell.batches for cell in found) - called
        reached &= bool(called) and covering / called >= LEAST_COVERAGE and all(cell.reached for cell in found)
        print(
            f"{kind}: {called:,} of {called + others:,} called a 95 % interval, {covering / max(called, 1):.1%} "
            f"cover; lowest of {len(judged)} cells {lowest:.1%}; the others, called ranges, "
            f"{rest / max(others, 1):.1%}",
            flush=True,
        )
        texts.append(f"{kind}={covering / max(called, 1):.4f} {kind}_called={called} {kind}_lowest={lowest:.3f}")
    print(*texts, f"seconds={time.perf_counter() - start:.0f} reached={str(reached).lower()}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
