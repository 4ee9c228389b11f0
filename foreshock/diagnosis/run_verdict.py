"""The verdict on a run: its mismatch, its reward and lengths, and its open alerts, in one headline.

The headline names what is worst, since when and why. "healthy" is said of the mismatch alone: with a learning rate that
is too high a run can end while its log-probs stay healthy. That the reward does not fall is said only of a run that
logs its reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.health import Health, HealthVerdict, worst_health
from foreshock.diagnosis.reward import HELD_OBSERVATIONS, TRAILING_VALUES, collapse_step, floor_of
from foreshock.diagnosis.statistics import autocorrelated_noise, median
from foreshock.diagnosis.wording import number, plural
from foreshock.model_kind import ModelKind
from foreshock.ranges import verdict_of
from foreshock.severity import Severity, severity_rank

_OF_SEVERITY: dict[Severity, HealthVerdict] = {"info": "unknown", "warning": "warning", "critical": "critical"}
_LENGTH_RATIO = 1.5
"""A length that changed by less since the fall is not told: it varies so much with the prompts."""


@dataclass(frozen=True, slots=True)
class StandingAlert:
    """An open or acknowledged alert: the rule's name, its reason, and the step since which it is open.

    Only alerts `of_mismatch` tell since when the mismatch is beyond its range.
    """

    rule: str
    severity: Severity
    since: int
    why: str
    of_mismatch: bool = True


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The verdict, since which step (None: the data do not tell), the headline, and what stands behind it.

    `mismatch` is the verdict on the mismatch alone; `fall` the collapse of the reward, None without one.
    """

    verdict: HealthVerdict
    since: int | None
    headline: str
    sentences: tuple[str, ...]
    mismatch: HealthVerdict
    fall: RewardFall | None = None


def conclude_run(
    mismatch: Health | None,
    signals: RunSignals,
    alerts: Sequence[StandingAlert] = (),
    model_kind: ModelKind | None = None,
) -> RunVerdict:
    """Return the verdict on a run. `mismatch`: None if no step has both log-probs; `alerts`: in any order."""
    of_mismatch = mismatch.verdict if mismatch is not None else "unknown"
    grave = sorted(
        (each for each in alerts if each.severity != "info"),
        key=lambda each: (severity_rank(each.severity), each.since),
    )
    of_alerts = worst_health([_OF_SEVERITY[each.severity] for each in grave])
    fall = reward_fall(signals.reward)
    if fall is not None:
        headline = _of_fall(fall, signals, model_kind)
        return RunVerdict("critical", fall.since, headline, _mismatch_behind(mismatch), of_mismatch, fall)
    if grave and worst_health([of_alerts, of_mismatch]) != of_mismatch:
        first = grave[0]
        others = f" {plural(len(grave) - 1, 'more alert')} below." if len(grave) > 1 else ""
        headline = f"{_capital(of_alerts)} since step {first.since}: {first.rule}. {first.why}{others}"
        return RunVerdict(of_alerts, first.since, headline, _mismatch_behind(mismatch), of_mismatch)
    if mismatch is None:
        why = "No step has both rollout_log_probs and trainer_log_probs: log both to see the mismatch."
        return RunVerdict("unknown", None, f"Mismatch not measured{_reward_clause(signals)}.", (why,), "unknown")
    headline, *behind = mismatch.sentences
    steps = [each.since for each in grave if each.of_mismatch] if of_mismatch in ("warning", "critical") else []
    since = min(steps, default=None)
    if since is not None:
        headline = headline.replace(_capital(of_mismatch), f"{_capital(of_mismatch)} since step {since}", 1)
    headline = f"{headline.removesuffix('.')}{_reward_clause(signals)}."
    return RunVerdict(of_mismatch, since, headline, tuple(behind), of_mismatch)


def _of_fall(fall: RewardFall, signals: RunSignals, model_kind: ModelKind | None) -> str:
    headline = (
        f"Critical since step {fall.since}: the reward fell from {_reward(fall.before)} to {_reward(fall.now)}"
        f"{_length_clause(fall, signals)}."
    )
    k3 = signals.k3.around(fall.since)
    if math.isnan(k3):
        return f"{headline} The mismatch at that step is not known."
    found = verdict_of("k3_kl", k3, model_kind)
    if found == "healthy":
        return (
            f"{headline} k3 of {TRAINER_ROLLOUT} was {number(k3)} then, in its healthy range: look at the "
            "learning rate and the data of these steps first."
        )
    return f"{headline} k3 of {TRAINER_ROLLOUT} was {number(k3)} then, {found}: the mismatch may be the cause."


def _length_clause(fall: RewardFall, signals: RunSignals) -> str:
    before, now = signals.length.before(fall.since), signals.length.newest()
    if not before > 0.0 or not now > 0.0 or max(before / now, now / before) < _LENGTH_RATIO:
        return ""
    return f", and the responses {'shrank' if now < before else 'grew'} from {number(before)} to {number(now)} tokens"


def _reward_clause(signals: RunSignals) -> str:
    now = signals.reward.newest()
    if math.isnan(now):
        return ""
    return f". Reward {_reward(now)}" + (", no collapse" if len(signals.reward.values) >= LEAST_VALUES else "")


def _reward(value: float) -> str:
    """Return a reward as people write it: 0.042, not 4.2e-2."""
    return f"{value:.2g}".replace("-", "−") if 1e-3 <= abs(value) < 0.1 else number(value)


def _mismatch_behind(mismatch: Health | None) -> tuple[str, ...]:
    """Return the mismatch's own verdict as sentences below another headline."""
    if mismatch is None:
        return ()
    headline, *others = mismatch.sentences
    return (f"Mismatch {headline[0].lower()}{headline[1:]}", *others)


def _capital(verdict: HealthVerdict) -> str:
    return f"{verdict[0].upper()}{verdict[1:]}"


LEAST_VALUES = HELD_OBSERVATIONS + TRAILING_VALUES
"""With fewer values of the reward a collapse can neither be seen nor ruled out."""

NEWEST_VALUES = 10
"""The newest values whose median is "now", as many as the steps that the mismatch is pooled over."""

LEAST_Z = 4.0
"""Standard deviations between the level before and since the fall. The split is chosen among all steps: over 1,000
values of noise the largest such difference exceeds 4 in about 1 of 200 runs (Worsley 1979)."""

MOST_BEFORE = 20
"""Values before the fall that its level is taken from: longer, a rising reward would have a level below its best."""

MOST_AFTER = 64
"""Values since the fall that its size is judged by, as many as the detector of falls takes its noise from."""


@dataclass(frozen=True, slots=True)
class SteppedValues:
    """A quantity at ascending steps; values are finite."""

    steps: Sequence[int]
    values: Sequence[float]

    def newest(self) -> float:
        """Return the median of the newest values; NaN without any."""
        return median(list(self.values[-NEWEST_VALUES:])) if self.values else math.nan

    def before(self, step: int) -> float:
        """Return the median of the values just before `step`; NaN without any."""
        earlier = [value for at, value in zip(self.steps, self.values, strict=True) if at < step]
        return median(earlier[-NEWEST_VALUES:]) if earlier else math.nan

    def around(self, step: int) -> float:
        """Return the median of the values of the `NEWEST_VALUES` steps on either side of `step`; NaN without any."""
        near = [value for at, value in zip(self.steps, self.values, strict=True) if abs(at - step) <= NEWEST_VALUES]
        return median(near) if near else math.nan


@dataclass(frozen=True, slots=True)
class RewardFall:
    """A collapse that lasts: `since` its first step below half of the level before, and the levels before and now."""

    since: int
    before: float
    now: float


@dataclass(frozen=True, slots=True)
class RunSignals:
    """What a run's steps tell beside the mismatch; empty series if they are not logged."""

    reward: SteppedValues
    length: SteppedValues
    k3: SteppedValues


def reward_fall(reward: SteppedValues) -> RewardFall | None:
    """Return the collapse of the reward that lasts up to the newest step; None if there is none, or too little data.

    By the definition of `foreshock.diagnosis.reward`, and only if the fall is `LEAST_Z` standard deviations of
    the autocorrelated noise: the best of many noisy levels is twice the usual one by chance.
    """
    steps, values = list(reward.steps), list(reward.values)
    if len(values) < LEAST_VALUES:
        return None
    floor = floor_of(min(values))
    since = collapse_step(steps, values, floor)
    if since is None:
        return None
    split = steps.index(since)
    half = floor + 0.5 * (median(values[max(split - MOST_BEFORE, 0) : split] or [floor]) - floor)
    # A median of five is low two values after the reward is.
    while split > 0 and values[split - 1] < half:
        split -= 1
    before, after = values[max(split - MOST_BEFORE, 0) : split], values[split : split + MOST_AFTER]
    if len(before) < TRAILING_VALUES:
        return None
    high, low = median(before), reward.newest()
    if low - floor >= 0.5 * (high - floor):
        return None
    noise = autocorrelated_noise([before, after])
    error = math.hypot(noise.deviation_of_mean(len(before)), noise.deviation_of_mean(len(after)))
    fallen = sum(before) / len(before) - sum(after) / len(after)
    if fallen < LEAST_Z * error:
        return None
    return RewardFall(steps[split], high, low)
