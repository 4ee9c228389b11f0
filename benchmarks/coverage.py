"""Measure how often the range of k3 over a batch's prompts contains the population's mean: `make bench-coverage`.

400 batches each of populations whose prompts, rollouts or tokens differ. No interval over the prompts of a batch can
contain the mean 95 % of the time if rare prompts are not in the batch. Therefore no range is called a 95 % interval,
and only the first population, whose prompts are alike, has a bar: 92 to 98 %.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from benchmarks.bars import Line, report
from foreshock.measures.estimators.bootstrap import nonnegative_intervals
from foreshock.measures.estimators.intervals import Interval

BAR = (0.92, 0.98)


@dataclass(frozen=True, slots=True)
class Population:
    """Rollouts with |d| of about a hundredth; each field is a way in which prompts, rollouts or tokens differ."""

    name: str
    growth: float = 0.0
    """ratio of |d| at the longest response's end to that at its start, minus 1"""
    offset: float = 0.0
    """share of rollouts whose d is off by 0.1"""
    heavy: float = 0.0
    """share of prompts with ten times the |d|"""
    spread: float = 0.0
    """standard deviation of log |d| over prompts"""
    of_rollouts: float = 0.0
    """standard deviation of log |d| over rollouts"""
    long: float = 0.0
    """standard deviation of log lengths"""
    tails: float = 0.0
    """degrees of freedom of Student's t, cut at 5, for d; 0: normal"""
    rare: float = 0.0
    """share of tokens with a d of −1"""
    tail: float = 0.0
    """d of the last token of every response"""
    rollouts: int = 16
    """rollouts per prompt"""

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
    # The populations above come from reports; those below are our own.
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
    """Print how often the reported range of k3 contains the mean, for populations whose prompts or rollouts differ."""
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


def main() -> int:
    alike = print_populations()["alike"]
    return report(
        [
            Line("lowest", "lowest coverage where prompts are alike", min(alike), BAR[0], at_least=True),
            Line("highest", "highest", max(alike), BAR[1]),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
