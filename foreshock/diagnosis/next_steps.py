"""What to do about a run: each advice once, first for a collapse of the reward, then for the causes."""

from __future__ import annotations

from collections.abc import Sequence

from foreshock.api.diagnosis import DiagnosisCause, MissingData
from foreshock.diagnosis.causes import OF_SIGNAL, PLACE, SET_APART, is_current, signal_of, went_wrong
from foreshock.diagnosis.episodes import POLICY, episodes_of, family_of, is_of_mismatch
from foreshock.diagnosis.headline import (
    ENTROPY_FALL,
    ENTROPY_RULE,
    OF_FALL,
    PERPLEXITY_RULE,
    SAID_BY,
    changed_first,
)
from foreshock.diagnosis.history import NEWEST_STEPS, History, PastAlert
from foreshock.diagnosis.mismatch_order import MISMATCH_LATER
from foreshock.diagnosis.mismatch_rules import LOWER, PROBE
from foreshock.diagnosis.reward import COLLAPSE_RULE, FALL_RULE, where_to_look
from foreshock.diagnosis.source_rewards import MIX_CHANGED, ONE_SOURCE_FELL
from foreshock.severity import severity_rank


def next_steps(
    grave: Sequence[PastAlert],
    causes: Sequence[DiagnosisCause],
    missing: Sequence[MissingData],
    history: History,
) -> tuple[str, ...]:
    """Return what to do, each advice once: first for a collapse of the reward, then for the causes, for the other
    alerts (the gravest first) and for what is missing."""
    ordered = sorted(grave, key=lambda each: (severity_rank(each.severity), each.step, each.rule))
    collapse, fall = (
        next((each for each in ordered if each.rule == rule), None) for rule in (COLLAPSE_RULE, FALL_RULE)
    )
    setting = _named_setting(causes, history)
    found, is_said = [], False
    if collapse is not None:
        wrong = went_wrong(grave, history)
        began = collapse.onset if wrong is None else wrong
        # An alert that was open when the reward fell counts, though it may have cleared since.
        lasted = (each for each in history.alerts if each.severity != "info" and each.cleared is not None)
        signs = [each.onset for each in lasted if each.onset < collapse.onset <= (each.cleared or 0)]
        # So does a sign on the policy that is no warning by itself, from the second half of the steps before the fall.
        of_policy = (each for each in history.alerts if family_of(each.rule, each.evidence) == POLICY)
        signs += [
            each.onset for each in of_policy if each.is_open and collapse.onset / 2 <= each.onset < collapse.onset
        ]
        began = min([began, *signs])
        if (signal := signal_of(collapse, causes)) is not None:
            setting, began = signal, min(began, int(signal.evidence["first_step"]))
        elif (of_fall := next((each for each in causes if each.name in OF_FALL), None)) is not None:
            setting = of_fall
        # After a fall that the mismatch followed, the setting is not the reason of the fall.
        follows = collapse.evidence.get("first") in MISMATCH_LATER
        is_said = setting is not None and (setting.name in {*OF_SIGNAL, *OF_FALL} or not follows)
        look = where_to_look(collapse.evidence)
        earlier = (each for each in grave if is_of_mismatch(each) and each.onset < collapse.onset)
        if collapse.evidence.get("first") == "unknown" and any(each.severity == "critical" for each in earlier):
            # Too few steps for an order by k3 alone, but its alert is older than the fall.
            look = where_to_look({"first": "mismatch"})
        if setting is not None and is_said:
            look = setting.what_to_do
        elif follows and (changed := changed_first(collapse, grave, history)) is not None:
            look = _OF_POLICY.get(changed.rule, look)
        # No earlier policy is better if only the prompts are others, or one of several rewards.
        no_way_back = setting is not None and setting.name in (MIX_CHANGED, ONE_SOURCE_FELL)
        found = [look if no_way_back else f"{_way_back(collapse, began, history)} {look}"]
    elif fall is not None and fall.evidence.get("first") in MISMATCH_LATER:
        led = changed_first(fall, grave, history)
        found = [] if led is None else [_OF_POLICY.get(led.rule, "")]
    found += [
        each.what_to_do
        for each in causes
        if not (is_said and each is setting) and (each.name != PLACE or setting is None)
    ]
    found += _to_doctor(causes, history)
    found += [PROBE] if not grave and above_since(history) is not None else []
    # What follows from the same cause has the same remedy. A fault that the data prove needs no probe to be found.
    heads = [each[0] for each in episodes_of(grave) if each[0].rule != COLLAPSE_RULE]
    if collapse is not None or fall is not None:
        # What to do for a policy that changes asks whether the reward falls.
        heads = [each for each in heads if family_of(each.rule, each.evidence) != POLICY]
    advised = {each.name for each in causes if each.what_to_do}
    of_alerts = [each.what_to_do for each in heads if advised.isdisjoint(SAID_BY.get(each.rule, ()))]
    # Neither a probe nor a lower rate helps against a known fault of one side.
    found += [each for each in of_alerts if each not in {PROBE, LOWER} or not _is_known(causes, history)]
    found += [each.what_to_do for each in missing]
    return tuple(dict.fromkeys(filter(None, found)))


def _is_known(causes: Sequence[DiagnosisCause], history: History) -> bool:
    """Return whether the lint, the notary or the doctor has proven what makes the mismatch, not only its place."""
    first = next(iter(causes), None)
    if first is None or first.certainty != "shown" or not first.explains or first.name in {PLACE, *SET_APART}:
        return False
    return first.source in ("lint", "notary", "doctor") and is_current(first, history)


def _to_doctor(causes: Sequence[DiagnosisCause], history: History) -> list[str]:
    """Return the next step after a probe has found the link: which setting it is. None if the mismatch is healthy."""
    probed = next((each for each in causes if each.source == "probe" and is_current(each, history)), None)
    is_known = any(each.source == "doctor" and each.certainty == "shown" for each in causes)
    if probed is None or is_known or not history.judged_k3 > history.healthy_end:
        return []
    return [f"Find the setting: `foreshock doctor RUN --step {probed.evidence['step']}` tries what this link may do."]


def _named_setting(causes: Sequence[DiagnosisCause], history: History) -> DiagnosisCause | None:
    """Return the first cause if it is a setting that the doctor names, so that no further look is needed."""
    first = next(iter(causes), None)
    if first is None or first.source != "doctor" or first.certainty != "shown" or not first.what_to_do:
        return None
    return first if is_current(first, history) else None


_TO_NOISE = "The policy went towards noise first: look at the entropy bonus, the clip range and the learning rate."
_OF_POLICY = {
    ENTROPY_RULE: _TO_NOISE,
    PERPLEXITY_RULE: _TO_NOISE,
    ENTROPY_FALL: "The entropy had collapsed before: look at the learning rate, the entropy bonus, the upper clip "
    "range, and how many groups still have a spread of rewards.",
    "gradient_rise": "The gradient grew first: look at its batches, its clipping and the learning rate.",
}


def _way_back(collapse: PastAlert, onset: int, history: History) -> str:
    """Return the checkpoint to go back to; `onset` is the first step of all that went wrong after the run began.

    A checkpoint from between this step and the fall holds weights that are damaged already.
    """
    onset = min([onset, *(int(collapse.evidence[name]) for name in _ONSETS if name in collapse.evidence)])
    earlier = [step for step in history.checkpoints if step < onset]
    if earlier:
        where = f"the checkpoint of step {earlier[-1]}, the newest from before step {onset}"
    else:
        where = f"a checkpoint from before step {onset}, where it began"
        where += "; no announced one is so old" if history.checkpoints else ""
    return f"Stop, or go back to {where}."


_ONSETS = ("onset_step", "k3_onset_step")


def above_since(history: History) -> int | None:
    """Return the first step of the window if k3 is above its range in every one of enough steps; None otherwise."""
    steps, values, _ = history.course
    is_above = len(steps) >= NEWEST_STEPS and min(values) > history.healthy_end
    return steps[0] if is_above and history.judged_k3 > history.healthy_end else None
