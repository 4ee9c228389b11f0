"""The facts about a run's newest steps from which its diagnosis is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from foreshock.api.diagnosis import DiagnosisCause, MissingData
from foreshock.api.runs import ChangeRecord
from foreshock.api.watch import onset_of
from foreshock.diagnosis.lags import AT_LAG_ZERO, LagLevels, StepLags
from foreshock.diagnosis.odd_steps import OddSteps, odd_steps
from foreshock.diagnosis.sync_period import sync_period
from foreshock.healthy_ranges import required_range
from foreshock.model_kind import ModelKind
from foreshock.severity import Severity

NEWEST_STEPS: Final = 10
"""Number of newest values that represent "now"."""

WINDOW_STEPS: Final = 64
"""Number of newest steps in a history."""


@dataclass(frozen=True, slots=True)
class PastAlert:
    """A stored alert that is not retracted; `is_open`: open or acknowledged."""

    rule: str
    severity: Severity
    step: int
    is_open: bool
    why: str
    what_to_do: str = ""
    value: float = math.nan
    threshold: float = math.nan
    evidence: Mapping[str, Any] = field(default_factory=dict)
    cleared: int | None = None
    """the step at which its rule cleared; None if it is open, or a person resolved it"""

    @property
    def onset(self) -> int:
        """The step at which it began if a detector dated it, else the step at which it fired."""
        return onset_of(self.step, self.evidence)


@dataclass(frozen=True, slots=True)
class SteppedValues:
    """A quantity at ascending steps; the values are finite."""

    steps: Sequence[int] = ()
    values: Sequence[float] = ()

    def newest(self, count: int = NEWEST_STEPS) -> float:
        """Return the median of the newest values; NaN without any."""
        return median(list(self.values[-count:])) if self.values else math.nan

    def best(self, count: int = NEWEST_STEPS) -> float:
        """Return the highest median of `count` values in a row; NaN with fewer values."""
        ends = range(count, len(self.values) + 1)
        return max((median(list(self.values[end - count : end])) for end in ends), default=math.nan)


@dataclass(frozen=True, slots=True)
class AwaitedShards:
    """An open step with missing shards; `since_us`: when its newest shard arrived, UTC microseconds."""

    step: int
    missing: tuple[int, ...]
    expected: int
    since_us: int


@dataclass(frozen=True, slots=True)
class History:
    """The facts about a run's newest steps, as plain data.

    `k3` is that of trainer/rollout, with `tokens` and `lags` at the same steps, and with `k3_of_others`, that without
    the largest token of each step (absent: the same); `reported` has the newest k3 that the trainer reports, with its
    |d|, if no step has both log-probs. `first_k3`, with `first_lags`, is that of the run's first steps, if they are not
    among the newest. `reward` and `length` are means of a step, `truncated` is the fraction of responses that were cut,
    `finished_reward` the mean reward of the others, `tool_tokens` the masked tokens of a rollout,
    `sources` by step the number and the sum of the rewards of each data source, where it is asked for.
    `prompts` by step its least hashes of prompts, of a run that was resumed those of all steps.
    `evaluations` are the rewards of evaluations by the name of their scalar, `rates` the logged learning
    rates of the newest steps if the newest is 0, else of those about an open fall of the reward, `gradients` the norms
    about such a fall, or the newest one that is over.
    `newest_step` is the newest one with rollouts. `causes` come from the lint, in the order of its catalogue, and from
    probes, whose evidence has a `step`. `undeclared` is what must be declared before the lint can find more.
    `checkpoints` are the steps with an announced checkpoint, ascending, `resumes` the steps at which attempts resumed,
    `changes` the newest changes that were announced or that the setup of the rollouts shows.
    """

    alerts: tuple[PastAlert, ...] = ()
    observed_step: int | None = None
    newest_step: int | None = None
    k3: SteppedValues = SteppedValues()
    tokens: Sequence[int] = ()
    k3_of_others: Sequence[float] = ()
    lags: Sequence[StepLags] = ()
    first_k3: SteppedValues = SteppedValues()
    first_lags: Sequence[StepLags] = ()
    reported: Mapping[str, float] = field(default_factory=dict)
    reward: SteppedValues = SteppedValues()
    evaluations: Mapping[str, SteppedValues] = field(default_factory=dict)
    rates: SteppedValues = SteppedValues()
    gradients: SteppedValues = SteppedValues()
    entropy: SteppedValues = SteppedValues()
    length: SteppedValues = SteppedValues()
    truncated: SteppedValues = SteppedValues()
    finished_reward: SteppedValues = SteppedValues()
    tool_tokens: SteppedValues = SteppedValues()
    sources: Mapping[int, Mapping[str, tuple[int, float]]] = field(default_factory=dict)
    prompts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    causes: tuple[DiagnosisCause, ...] = ()
    undeclared: tuple[MissingData, ...] = ()
    unlogged: tuple[MissingData, ...] = ()
    awaited: tuple[AwaitedShards, ...] = ()
    model_kind: ModelKind | None = None
    checkpoints: Sequence[int] = ()
    resumes: Sequence[int] = ()
    changes: Sequence[ChangeRecord] = ()

    @property
    def healthy_end(self) -> float:
        """The largest healthy k3 of this kind of model, in nats per token."""
        return required_range("k3_kl", self.model_kind).warning or math.inf

    @property
    def newest_lags(self) -> LagLevels:
        """k3 at each lag over the newest steps that are not odd."""
        newest = zip(self.k3.steps[-NEWEST_STEPS:], self.lags[-NEWEST_STEPS:], strict=False)
        odd = self._of_odd
        return LagLevels.of([lags for step, lags in newest if step not in odd])

    @property
    def odd(self) -> OddSteps | None:
        """The single steps whose k3 is far above that of the others; of mixed lags, k3 at lag 0."""
        steps, values, _ = self.course
        if sync_period(steps, values, self.healthy_end) is not None:
            return None
        return odd_steps(steps, values, self.healthy_end)

    @property
    def _of_odd(self) -> frozenset[int]:
        return frozenset() if (odd := self.odd) is None else odd.steps

    @property
    def course(self) -> tuple[Sequence[int], Sequence[float], str]:
        """The steps, the k3 that is judged there, and its name: at lag 0 if lags are mixed."""
        if len({lag for each in self.lags for lag in each.tokens}) <= 1:
            return self.k3.steps, self.k3_of_others or self.k3.values, "k3"
        at_zero = at_lag_zero(self.k3.steps, self.lags)
        return list(at_zero), list(at_zero.values()), "k3 at lag 0"

    @property
    def k3_now(self) -> float:
        """The mean k3 over the tokens of the newest steps that are not odd, in nats; NaN without any."""
        return self._of_newest(self.k3.values)

    @property
    def k3_now_of_others(self) -> float:
        """`k3_now` without the largest token of each step."""
        return self._of_newest(self.k3_of_others or self.k3.values)

    @property
    def judged_k3(self) -> float:
        """The k3 that is compared with the range: at lag 0 if lags are mixed; −inf if there is none."""
        levels = self.newest_lags
        if levels.hides_numerics:
            return -math.inf
        return levels.k3[AT_LAG_ZERO] if levels.is_mixed else self.k3_now_of_others

    def _of_newest(self, values: Sequence[float]) -> float:
        odd = self._of_odd
        rows = zip(*(each[-NEWEST_STEPS:] for each in (self.k3.steps, values, self.tokens)), strict=True)
        kept = [(value, count) for step, value, count in rows if step not in odd]
        whole = sum(count for _, count in kept)
        return sum(value * count for value, count in kept) / whole if whole else self.k3.newest()


def at_lag_zero(steps: Sequence[int], lags: Sequence[StepLags]) -> dict[int, float]:
    """Return k3 of the tokens at lag 0 by step, for steps with enough of them."""
    known = {step: each.numerics for step, each in zip(steps, lags, strict=True)}
    return {step: k3 for step, k3 in known.items() if k3 is not None}
