"""The verdict on a run: its mismatch, its reward and lengths, and its open alerts, in one headline.

The headline names what is worst, since when and why. "healthy" is said of the mismatch alone; that the reward does not
fall is said only of a run that logs its reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.conclusions.health import Health, HealthVerdict, worst_health
from foreshock.conclusions.run_signals import LEAST_VALUES, RewardFall, RunSignals, reward_fall
from foreshock.conclusions.wording import number, plural
from foreshock.model_kind import ModelKind
from foreshock.ranges import verdict_of
from foreshock.severity import Severity, severity_rank

__all__ = ["RunVerdict", "StandingAlert", "conclude_run"]

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
