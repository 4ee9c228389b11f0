"""Conclusions on environments: which replays ran in another environment than the run, and what that explains.

A link that is not 0 contains the difference between the environments of its ends. If they differ, or one is unknown, no
cause is named for it. Three kinds of evidence clear a link:

- it is equal bit for bit, whatever the fingerprints say;
- at another probed step it is 0 within rounding, in the same environments: a difference of environments would show at
  every step;
- it compares engine and trainer, and each end is in the run's own environment of that side, or both ends are in one
  environment: then it contains no difference that the run does not have. Its share is that of the run's own d.
"""

import math
from collections.abc import Sequence

from foreshock.api.attribution import AttributionDocument, EnvironmentLinkRecord, LinkRecord
from foreshock.diagnosis.conclusion import Conclusion
from foreshock.diagnosis.wording import interval_of_share, interval_text, number, percent
from foreshock.environment import Difference, differences
from foreshock.scorers import SCORERS

ZERO_K3 = 1e-13
"""The k3 in nats up to which a link counts as 0 within rounding: an rms difference of 4.5e-7. A replay in the run's own
environment has 0 to 4e-14. Between two environments the shipped run's checkpoints have 2.8e-12 to 2.7e-5 in bfloat16,
at one step up to 3e5 times more than at another."""
LEAST_K3 = 1e-5
LEAST_GROWTH = 1e4
"""A link has grown from 0 if its k3 is at least LEAST_K3 and LEAST_GROWTH times that of the other step. Two
environments in float32, which also begin near 0 (2e-14 to 8e-14 for the shipped run), stay far below LEAST_K3."""

_LOGGED = {"rollout": "at sampling", "trainer": "in the trainer"}
_ATTRIBUTES = {"rollout": "engine_fingerprint", "trainer": "trainer_fingerprint"}


def conclude_environments(document: AttributionDocument, others: Sequence[AttributionDocument]) -> list[Conclusion]:
    """Return what differs between the environments of each link's ends, and what replays in two environments show.

    `others` are the attributions of the run's other probed steps.
    """
    # That with most of the mismatch first: the first conclusion is what is printed of a step.
    links = sorted(document.links, key=lambda link: -link.share if math.isfinite(link.share) else math.inf)
    found = [each for link in links for each in _on_link(document, link, others)]
    return found + [each for link in document.environment_links for each in _on_two_environments(link)]


def _on_link(
    document: AttributionDocument, link: LinkRecord, others: Sequence[AttributionDocument]
) -> list[Conclusion]:
    later, earlier = link.name.split("/")
    if not link.rms_d > 0 or {earlier, later} <= set(_LOGGED):
        return []
    found = _differences(document, earlier, later)
    if not found:
        return []
    zero = _step_without(document, link, others)
    if zero is not None:
        points = sorted([zero, (document.step, link.k3_kl)])
        values = ", ".join(f"{number(k3)} at step {step}" for step, k3 in points)
        where = "in the same environment: the environment of the replay does not explain it"
        return [Conclusion("drift", f"k3 of {link.name} is {values}, {where}.", link.name)]
    known = [each for each in found if each.is_known]
    if known:
        return [Conclusion("environment-differs", _differs(link, earlier, later, known), link.name)]
    return [Conclusion("environment-unknown", _unknown(document, link, earlier, later, found), link.name)]


def _differences(document: AttributionDocument, earlier: str, later: str) -> tuple[Difference, ...]:
    """Return what differs between the environments of a link's ends and is not the link's own subject."""
    environments = document.environments
    before, after = environments.get(earlier), environments.get(later)
    if SCORERS[earlier].side == SCORERS[later].side:
        # If trainer and replay use different engines, that difference is the subject of the link.
        is_other_trainer = "trainer" in (earlier, later) and before and after and before.engine != after.engine
        return differences(before, after, same_engine=not is_other_trainer)
    for name, environment in ((earlier, before), (later, after)):
        # The run's own environment for that side of the chain.
        own = environments.get("rollout" if SCORERS[name].side == "engine" else "trainer")
        if differences(own, environment, same_engine=False):
            return differences(before, after, same_engine=False)
    return ()


def _step_without(
    document: AttributionDocument, link: LinkRecord, others: Sequence[AttributionDocument]
) -> tuple[int, float] | None:
    """Return the step and k3 at which the link was 0 in the same environments, in this attempt, if it has grown since.
    Of several such steps, the one with the least k3; None without one.
    """
    found = [
        (other.step, each.k3_kl)
        for other in others
        if other.attempt == document.attempt
        and all(other.environments.get(name) == document.environments.get(name) for name in link.name.split("/"))
        for each in other.links
        if each.name == link.name and each.k3_kl <= ZERO_K3 and link.k3_kl >= max(LEAST_K3, LEAST_GROWTH * each.k3_kl)
    ]
    return min(found, key=lambda point: point[1], default=None)


def _differs(link: LinkRecord, earlier: str, later: str, known: Sequence[Difference]) -> str:
    before, after = _place(earlier, later), _place(later, earlier)
    what = "; ".join(each.words(before, after) for each in known)
    return (
        f"The two ends of {link.name} ran in different environments ({what}). This link{_share(link)} contains that "
        "difference, so no cause is named for it; replay it in the run's own environment: "
        "foreshock probe --environment run."
    )


def _unknown(
    document: AttributionDocument, link: LinkRecord, earlier: str, later: str, found: Sequence[Difference]
) -> str:
    what = ", ".join(each.title for each in found)
    unknown = [name for name in (earlier, later) if document.environments.get(name) is None] or [
        name for name in (earlier, later) if name in _LOGGED
    ]
    names = " and ".join(unknown or (earlier, later))
    attributes = " and ".join(f"`{_ATTRIBUTES[name]}`" for name in unknown if name in _ATTRIBUTES)
    advice = f"; log the batch attribute {attributes}" if attributes else ""
    return (
        f"The environment of {names} is not fully known ({what}), so {link.name}{_share(link)} may be due to a "
        f"replay in another environment, and no cause is named for it{advice}."
    )


def _on_two_environments(link: EnvironmentLinkRecord) -> list[Conclusion]:
    share = f", {percent(link.share)} of the mismatch" if math.isfinite(link.share) else ""
    if share:
        share += f" ({interval_of_share(link.share_low, link.share_high)})"
    first, second = link.first.words, link.second.words
    if first == second:
        differ = differences(link.first, link.second, same_engine=True)
        second = f"{second} ({'; '.join(each.words('before', 'now') for each in differ)})"
    found = [
        Conclusion(
            "environment-measured",
            f"{link.scorer} on {second} against the same on {first}: k3 {number(link.k3_kl)}{share}. "
            "This is what the environment alone changes.",
        )
    ]
    if link.logged is None or not math.isfinite(link.excess):
        return found
    ends = interval_text(link.excess_low, link.excess_high)
    words = ends if math.isfinite(link.excess_low) else "no interval: too few prompts"
    found.append(
        Conclusion(
            "environment-measured",
            f"Neither of these two environments is known to be the run's own. Beyond what they differ by, "
            f"{link.scorer} and {link.logged} differ by {number(link.excess)} nats per token ({words}), if the run's "
            "environment differs from each of the two as they differ from each other (an assumption).",
        )
    )
    return found


def _place(name: str, other: str) -> str:
    if name in _LOGGED:
        return _LOGGED[name]
    return "in the replay" if other in _LOGGED else f"in {name}"


def _share(link: LinkRecord) -> str:
    """Return the link's share in words; empty if it is not from 0 to 1 because links cancel."""
    return f" ({percent(link.share)} of the difference)" if 0.0 <= link.share <= 1.0 else ""
