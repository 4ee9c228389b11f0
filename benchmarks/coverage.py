"""Measure how often the ranges over prompts, nominally of 95 %, hold exact values. `make bench-coverage`

Batches of rollouts are drawn from a tiny policy μ (benchmarks/tiny_policy.py). Its divergence from π, the same policy
rounded to fewer bits, is known exactly. Each batch gives two intervals by prompt group, Student's t and the
bootstrap-t; the benchmark counts how often each contains the exact value. μ covers π, so the sampled estimators of k3,
χ² and TV have the exact per-token KL(μ‖π), χ²(π‖μ) and TV as their expectation. This is tested too: the mean over
batches lies within three standard errors of the exact value.

Bar: the recommended interval, the bootstrap-t, covers 93–97 % over 2,000 batches of 128 prompts × 8 rollouts at three
levels of mismatch, for all three measures. Without a bar: a quarter of the prompts, and a policy of very uneven prompts
with outlier channels, whose k3 comes from a few prompts that many batches lack. Its last χ² comes from tokens so rare
under μ that no batch has one: no estimate from samples can include them. A second table has populations in which no
interval over the prompts of a batch can hold the mean 95 % of the time: therefore none is called a 95 % interval.

The kinds of interval were chosen on policies of other seeds, before this table was computed. On four more seeds, of
1,000 batches each, the 36 barred cells were between 92.5 and 96.8 %, 94.7 % on average, each with an error of 0.7 %.
Rollouts of a group are more dependent here than on recorded runs (the error is 4 to 5 times that of independent tokens,
there 1.3 to 1.8), which makes coverage harder.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.tiny_policy import PROMPTS, Sampler, TinyPolicy, Traits
from foreshock.measures.estimators.bootstrap import bootstrap_intervals, nonnegative_intervals
from foreshock.measures.estimators.intervals import Interval, clustered_interval

Float64 = NDArray[np.float64]

SEED = 20261121
LEVELS = (8, 6, 4)  # significant bits: bfloat16 has 8, float8 e4m3 has 4
MEASURES = ("k3_kl", "chi2_token", "tv_token")
KINDS = ("student", "bootstrap")
RECOMMENDED = "bootstrap"
BAR = (0.93, 0.97)
BATCHES = 2000
ROLLOUTS_OF_A_PROMPT = 8
MOST_PROMPTS = 128
BATCHES_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Setting:
    """A policy and its batch sizes; `barred` is the batch size, in prompts, with a bar (0: none)."""

    name: str
    traits: Traits
    batch_prompts: tuple[int, ...]
    batches_share: float
    barred: int


SETTINGS = (
    Setting("even prompts", Traits(), (128, 32), 1.0, 128),
    Setting("uneven prompts", Traits(prompt_size=1.0, sharpness=(1.5, 0.5), outliers=6.0), (128,), 0.5, 0),
)


@dataclass(slots=True)
class Cell:
    """One measure at one level of mismatch: the exact value, and the counts over batches."""

    setting: str
    prompts: int
    bits: int
    measure: str
    exact: float
    barred: bool
    estimates: list[float] = field(default_factory=list)
    too_low: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    too_high: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    widths: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))

    def count(self, kind: str, interval: Interval) -> None:
        """Count one batch's interval."""
        self.too_low[kind] += interval.high < self.exact
        self.too_high[kind] += interval.low > self.exact
        self.widths[kind] += interval.high - interval.low
        if kind == RECOMMENDED:
            self.estimates.append(interval.mean)

    def coverage(self, kind: str) -> float:
        """Return the share of batches whose interval contains the exact value."""
        return 1.0 - (self.too_low[kind] + self.too_high[kind]) / len(self.estimates)

    @property
    def bias_in_errors(self) -> float:
        """The mean estimate's distance from the exact value, in standard errors of that mean."""
        values = np.array(self.estimates)
        return float((values.mean() - self.exact) / (values.std(ddof=1) / math.sqrt(values.size)))

    @property
    def relative_bias(self) -> float:
        """The mean estimate over the exact value, minus one."""
        return float(np.mean(self.estimates)) / self.exact - 1.0

    @property
    def reached(self) -> bool:
        """True if the coverage of the recommended interval is within the bar."""
        return BAR[0] <= self.coverage(RECOMMENDED) <= BAR[1]


def divergences(behaviour: TinyPolicy, target: TinyPolicy) -> Float64:
    """Return k3, (ρ − 1)² and (1 − ρ)⁺ of every state and token, stacked last."""
    d = target.log_probs - behaviour.log_probs
    rho_minus_one = np.expm1(d)
    return np.stack([rho_minus_one - d, np.square(rho_minus_one), np.maximum(-rho_minus_one, 0.0)], axis=-1)


def batches_of(sampler: Sampler, values: Float64, count: int, seed: int) -> Iterator[tuple[Float64, Float64]]:
    """Yield (sums [rollouts, K], tokens [rollouts]) of `count` batches; rollouts of a prompt are consecutive."""
    table = np.ascontiguousarray(values.reshape(-1, values.shape[-1]))
    for first in range(0, count, BATCHES_AT_ONCE):
        random = np.random.default_rng([seed, first])
        drawn = random.integers(0, PROMPTS, min(BATCHES_AT_ONCE, count - first) * MOST_PROMPTS)
        prompts = np.repeat(drawn, ROLLOUTS_OF_A_PROMPT)
        sums, tokens = np.zeros((prompts.size, table.shape[1])), np.zeros(prompts.size)
        for running, places in sampler.responses(prompts, random):
            sums[running] += table[places]
            tokens[running] += 1.0
        size = MOST_PROMPTS * ROLLOUTS_OF_A_PROMPT
        for start in range(0, prompts.size, size):
            yield sums[start : start + size], tokens[start : start + size]


def cells_of(setting: Setting, batches: int) -> list[Cell]:
    """Run the experiment of one setting and return its cells."""
    behaviour = TinyPolicy.of(SEED, None, setting.traits)
    values = np.concatenate(
        [divergences(behaviour, TinyPolicy.of(SEED, bits, setting.traits)) for bits in LEVELS], axis=-1
    )
    totals, length = behaviour.expectations(values)
    names = [(bits, measure) for bits in LEVELS for measure in MEASURES]
    cells = {
        prompts: [
            Cell(setting.name, prompts, bits, measure, float(total / length), prompts == setting.barred)
            for (bits, measure), total in zip(names, totals, strict=True)
        ]
        for prompts in setting.batch_prompts
    }
    groups = np.repeat(np.arange(MOST_PROMPTS), ROLLOUTS_OF_A_PROMPT)
    for sums, tokens in batches_of(Sampler.of(behaviour), values, round(batches * setting.batches_share), SEED):
        for prompts, row in cells.items():
            part = slice(0, prompts * ROLLOUTS_OF_A_PROMPT)
            counts = tokens[part].astype(np.int64)
            bootstrapped = bootstrap_intervals(sums[part], counts, groups[part])
            for cell, column, interval in zip(row, sums[part].T, bootstrapped, strict=True):
                cell.count("bootstrap", interval)
                cell.count("student", clustered_interval(column, counts, groups[part]))
    return [cell for row in cells.values() for cell in row]


def print_table(cells: list[Cell]) -> None:
    """Print a line per cell: exact value, bias, and for each interval its coverage, misses per side, and width."""
    head = "coverage  too low  too high  width"
    print(f"{'':56s} {'Student t':^35s}   {'bootstrap-t':^35s}")
    print(f"{'setting':15s} {'prompts':>7s} bits {'measure':10s} {'exact':>8s} {'bias':>7s}   {head}    {head}")
    for cell in cells:
        kinds = "    ".join(
            f"{cell.coverage(kind):8.2%}  {cell.too_low[kind] / len(cell.estimates):7.2%}  "
            f"{cell.too_high[kind] / len(cell.estimates):8.2%} "
            f"{cell.widths[kind] / len(cell.estimates) / cell.exact:6.2f}"
            for kind in KINDS
        )
        bias = f"{cell.bias_in_errors:+.1f}se" if abs(cell.bias_in_errors) < 100 else "unseen"
        mark = "  bar" if cell.barred else ""
        print(
            f"{cell.setting:15s} {cell.prompts:7d} {cell.bits:4d} {cell.measure:10s} {cell.exact:8.2e} "
            f"{bias:>7s}   {kinds}{mark}"
        )
    print("Widths are relative to the exact value; bias is of the mean over batches, in its own standard errors.")


@dataclass(frozen=True, slots=True)
class Population:
    """Rollouts with |d| of about a hundredth; each field is a way in which prompts, rollouts or tokens differ."""

    name: str
    growth: float = 0.0
    """|d| at the longest response's end over that at its start, minus 1"""
    offset: float = 0.0
    """share of rollouts whose d is off by 0.1"""
    heavy: float = 0.0
    """share of prompts with ten times the |d|"""
    spread: float = 0.0
    """standard deviation of log |d| over prompts"""
    of_rollouts: float = 0.0
    """the same over rollouts"""
    long: float = 0.0
    """standard deviation of log lengths"""
    tails: float = 0.0
    """degrees of freedom of Student's t, whose d is cut at 5; 0: normal"""
    rare: float = 0.0
    """share of tokens with a d of −1"""
    tail: float = 0.0
    """d of the last token of every response"""
    rollouts: int = 16
    """of a prompt"""

    def range_of_batch(self, prompts: int, seed: int) -> Interval:
        """Return the range of mean k3 of one batch."""
        random = np.random.default_rng(seed)
        count = self.rollouts * prompts
        lengths = random.integers(8, 200, count)
        if self.long:
            lengths = np.clip(60.0 * np.exp(self.long * random.normal(size=count)), 2, 4000).astype(np.int64)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        scale = np.repeat(np.where(random.random(prompts) < self.heavy, 10.0, 1.0), self.rollouts)
        if self.spread or self.of_rollouts:
            of_prompts = np.repeat(self.spread * random.normal(size=prompts), self.rollouts)
            scale = scale * np.exp(of_prompts + self.of_rollouts * random.normal(size=count))
        place = (np.arange(ends[-1]) - np.repeat(starts, lengths)) / 200.0
        noise = random.standard_t(self.tails, place.size) if self.tails else random.standard_normal(place.size)
        d = np.clip(0.01 * np.repeat(scale, lengths) * (1.0 + self.growth * place) * noise, -5.0, 5.0)
        d += np.repeat(0.1 * (random.random(count) < self.offset), lengths)
        if self.rare:
            d[random.random(d.size) < self.rare] = -1.0
        d[ends - 1] += self.tail
        sums = np.add.reduceat(np.expm1(d) - d, starts)
        return nonnegative_intervals(sums[:, None], lengths, np.repeat(np.arange(prompts), self.rollouts))[0]


POPULATIONS = (
    Population("alike"),
    Population("|d| grows tenfold over the response", growth=9.0),
    Population("3 % of the rollouts are off by 0.1", offset=0.03),
    Population("one prompt in 50 has ten times the |d|", heavy=0.02),
    # Those above are named by reports, those below are our own.
    Population("a third of the prompts have ten times the |d|", heavy=1 / 3),
    Population("|d| of prompts spreads by a factor of 1.6", spread=0.5),
    Population("|d| of rollouts spreads by a factor of 2.7", of_rollouts=1.0),
    Population("lengths spread by a factor of 2.7", long=1.0),
    Population("long responses, and |d| grows over them", long=0.7, growth=5.0),
    Population("d has the tails of Student's t, 3 degrees", tails=3.0),
    Population("one token in 500 has a d of −1", rare=0.002),
    Population("the last token of a response has a d of 0.5", tail=0.5),
    Population("two rollouts a prompt", rollouts=2),
    Population("|d| of prompts spreads by a factor of 2.7", spread=1.0),
)
OF_POPULATIONS = (8, 32, 128)


def print_populations(batches: int = 400) -> dict[str, list[float]]:
    """Print how often the reported range of k3 holds the mean of populations whose prompts or rollouts differ."""
    print(f"\n{f'population, {batches} batches':52s}" + "".join(f"{n:>5d} prompts" for n in OF_POPULATIONS))
    held: dict[str, list[float]] = {}
    for each in POPULATIONS:
        true = float(np.mean([each.range_of_batch(2000, 10**6 + seed).mean for seed in range(20)]))
        for prompts in OF_POPULATIONS:
            found = [each.range_of_batch(prompts, seed) for seed in range(batches)]
            held.setdefault(each.name, []).append(
                float(np.mean([range_.low <= true <= range_.high for range_ in found]))
            )
        print(f"{each.name:52s}" + "".join(f"{share:>13.1%}" for share in held[each.name]), flush=True)
    return held


def measure_coverage(batches: int = BATCHES) -> dict[str, float | bool]:
    """Run the experiment, print its table, and return its figures.

    `lowest` and `highest` are the coverage of the recommended interval over the barred cells, `student_lowest` that of
    Student's t, `largest_bias_in_errors` is in standard errors; `reached` is True if the bar is reached without bias.
    """
    start = time.perf_counter()
    cells = [cell for setting in SETTINGS for cell in cells_of(setting, batches)]
    print_table(cells)
    print_populations()
    barred = [cell for cell in cells if cell.barred]
    largest_bias = max(abs(cell.bias_in_errors) for cell in barred)
    return {
        "batches": batches,
        "cells": len(barred),
        "lowest": min(cell.coverage(RECOMMENDED) for cell in barred),
        "highest": max(cell.coverage(RECOMMENDED) for cell in barred),
        "student_lowest": min(cell.coverage("student") for cell in barred),
        "student_highest": max(cell.coverage("student") for cell in barred),
        "largest_bias_in_errors": largest_bias,
        "seconds": time.perf_counter() - start,
        "reached": all(cell.reached for cell in barred) and largest_bias < 3.0,
    }


def main() -> int:
    figures = measure_coverage()
    texts = {name: str(value).lower() if isinstance(value, bool) else f"{value:.4g}" for name, value in figures.items()}
    print(" ".join(f"{name}={text}" for name, text in texts.items()))
    return 0 if figures["reached"] else 1


if __name__ == "__main__":
    sys.exit(main())
