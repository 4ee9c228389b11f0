"""Episodes: alerts with one cause are one story, with one line, one message and one thing to do.

Many rules fire for one mismatch: on k3, χ², the mean ratio, the gradient norm. After a collapse of the reward nearly
all of them fire. A rule belongs to a family of causes; the alerts of a family that are open together are an episode.
What begins at or after a collapse of the reward belongs to the collapse. A policy or a gradient that changes after the
mismatch has risen belongs to it; one that changed before is a story of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from foreshock.diagnosis.reward import COLLAPSE_RULE
from foreshock.severity import Severity, severity_rank

REWARD: Final = "reward"
MISMATCH: Final = "mismatch"
POLICY: Final = "policy"

_FAMILIES: Final[Mapping[str, str]] = {
    "mismatch": MISMATCH,
    "sampling": MISMATCH,
    "staleness": MISMATCH,
    "gradient": POLICY,
    "policy": POLICY,
    "length": "length",
    REWARD: REWARD,
}
"""Cause of a rule → its family. Any other alert (data, delivery) is an episode of its own."""

_TRAINING: Final = frozenset(_FAMILIES.values())


class SomeAlert(Protocol):
    """The fields of an alert that episodes are made of."""

    @property
    def rule(self) -> str: ...
    @property
    def severity(self) -> Severity: ...
    @property
    def onset(self) -> int: ...
    @property
    def evidence(self) -> Mapping[str, Any]: ...


AlertT = TypeVar("AlertT", bound=SomeAlert)


def family_of(rule: str, evidence: Mapping[str, Any]) -> str:
    """Return the family of an alert; the rule itself if it is an episode of its own."""
    if rule.startswith("length_"):
        return "length"
    return _FAMILIES.get(str(evidence.get("cause")), rule)


def is_of_mismatch(alert: SomeAlert) -> bool:
    """Return whether an alert is one on the mismatch."""
    return family_of(alert.rule, alert.evidence) == MISMATCH


def episodes_of(alerts: Iterable[AlertT]) -> list[list[AlertT]]:
    """Return open alerts by episode, in each the gravest and then the oldest first.

    A collapse of the reward comes first, then the gravest and the oldest episode.
    """
    found: dict[str, list[AlertT]] = {}
    for alert in sorted(alerts, key=_gravest_first):
        found.setdefault(family_of(alert.rule, alert.evidence), []).append(alert)
    if POLICY in found and MISMATCH in found and _onset(found[POLICY]) >= _onset(found[MISMATCH]):
        found[MISMATCH] = sorted([*found[MISMATCH], *found.pop(POLICY)], key=_gravest_first)
    collapse = next((each for each in found.get(REWARD, ()) if each.rule == COLLAPSE_RULE), None)
    if collapse is not None:
        began = min(each.onset for each in found[REWARD])
        later = [name for name in found if name in _TRAINING - {REWARD} and _onset(found[name]) >= began]
        for name in later:
            found[REWARD] += found.pop(name)
        found[REWARD].sort(key=lambda each: (each.rule != COLLAPSE_RULE, *_gravest_first(each)))
    return sorted(found.values(), key=lambda each: (each[0].rule != COLLAPSE_RULE, *_gravest_first(each[0])))


def onset_of(head: SomeAlert, episode: Iterable[SomeAlert]) -> int:
    """Return the first onset of an episode by the alerts of the same cause as its `head`; infos date no graver one."""
    cause = head.evidence.get("cause")
    alike = (each for each in episode if each.evidence.get("cause") == cause)
    return min([head.onset, *(each.onset for each in alike if each.severity != "info" or head.severity == "info")])


def is_told(alert: SomeAlert, told: Sequence[SomeAlert]) -> bool:
    """Return True if the messages about the open alerts `told` make one about this alert unnecessary.

    That is so if an alert of its family is as grave, if it is a warning while something critical is open, and after a
    collapse.
    """
    family, rank = family_of(alert.rule, alert.evidence), severity_rank(alert.severity)
    families = [(family_of(each.rule, each.evidence), each) for each in told]
    alike = {family, MISMATCH} if family == POLICY else {family}
    if any(name in alike and severity_rank(each.severity) <= rank for name, each in families):
        return True
    if family not in _TRAINING:
        return False
    if alert.severity != "critical":
        return any(name in _TRAINING and each.severity == "critical" for name, each in families)
    return family != REWARD and any(each.rule == COLLAPSE_RULE for each in told)


def _onset(alerts: Iterable[SomeAlert]) -> int:
    return min(each.onset for each in alerts)


def _gravest_first(alert: SomeAlert) -> tuple[int, int, bool, str]:
    return severity_rank(alert.severity), alert.onset, not alert.rule.startswith("mismatch"), alert.rule
