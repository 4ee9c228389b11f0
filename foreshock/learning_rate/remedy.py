"""The remedy: what to do about a mismatch beside the learning rate, decided from what is known of the run.

- nothing: nothing of the mismatch follows the updates, and these are within their set point;
- correction: token TIS, from the step on at which something of the mismatch is driven (lag), or an update is beyond its
  set point. It stays on: switching a correction in mid-run does harm;
- correction_and_decay: the same while the control loop lowers the rate;
- rollback: the reward has collapsed. The newest announced checkpoint from before the onset is proposed, with the
  correction on; once in an episode, and never again the checkpoint that was gone back to, or a later one;
- cause: a static part is beyond the set point and most of the mismatch. No rate and no correction helps. Or the
  log-probs show no mismatch (copies, wrong ones, none at all): a correction by them would do nothing, or harm.

The loop makes the rate safe and a token correction makes it good; a sequence correction stops a run whose rate is too
high from learning (docs/closed-loop.md), so it is advised only if the trainer asks for it and it keeps the sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from foreshock.corrections import Evaluator
from foreshock.corrections.loss_weights import DEFAULT_CORRECTION
from foreshock.diagnosis.wording import number, percent
from foreshock.learning_rate.control_loop import LoopSettings, LoopState
from foreshock.learning_rate.levers import Correction, Rollback
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.rollout_summaries import RolloutSummaries

LEAST_ROLLOUTS: Final = 32
"""Least number of rollouts with a measured token. With fewer, the share that a mask keeps is known to ±17 % at best."""

LEAST_EFFECTIVE: Final = 0.5
"""Least effective sample, as a fraction: a sequence correction that leaves less costs more than half of the batch."""

LEAST_DRIVEN: Final = 1e-5
"""Nats per token. With a smaller driven part most ρ are within half a percent of 1, and a truncation changes none."""

LEAST_OF_STATIC: Final = 2.0
"""Least driven part as a multiple of the static one: k3 of other prompts alone is now and then twice that of a step."""

RemedyName = Literal["nothing", "correction", "correction_and_decay", "rollback", "cause"]


@dataclass(frozen=True, slots=True)
class Situation:
    """The facts about a run after its newest closed step.

    `fault` is why the newest log-probs show no mismatch, empty if they do. `collapse` is the onset of the reward's
    collapse, None without one; `checkpoints` are announced and not expired, ascending. `asked` is the correction that
    the trainer asks for; `asked_ess` the effective sample that it leaves, a fraction of all, None if unknown;
    `correction` the one that is advised now; `proposed` the rollback that is proposed now; `rolled_back` has the steps
    that the run went back to.
    """

    loop: LoopState
    settings: LoopSettings
    fault: str = ""
    collapse: int | None = None
    checkpoints: Sequence[Rollback] = ()
    asked: Correction | None = None
    asked_ess: float | None = None
    correction: Correction | None = None
    proposed: Rollback | None = None
    rolled_back: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Remedy:
    """What is decided: the value of each lever beside the rate, and why, in one sentence; empty: nothing is wrong."""

    name: RemedyName = "nothing"
    correction: Correction | None = None
    rollback: Rollback | None = None
    why: str = ""


def decide_remedy(known: Situation) -> Remedy:
    """Return the remedy."""
    loop, settings = known.loop, known.settings
    if not settings.enabled:
        return Remedy(correction=known.correction)
    reasons, driven = [], loop.average or 0.0
    fault = known.fault or ("no step has measured a mismatch" if loop.average is None else "")
    # If the static part is not measured, most of what is above it may be noise.
    least = max(LEAST_DRIVEN, LEAST_OF_STATIC * (loop.static or 0.0)) if loop.measured_static else math.inf
    if not fault and driven > min(least, loop.set_point(settings)):
        reasons.append(f"{number(driven)} nats per token of the mismatch come from lag")
    is_large = loop.update is not None and loop.update > loop.update_point(settings)
    if loop.update is not None and is_large:
        times = loop.update / loop.update_point(settings)
        reasons.append(
            f"an update moves the policy by {number(loop.update)} nats per token, {times:.2g} × its set point"
        )
    wanted, remark = _wanted(known)
    correction = known.correction
    if correction is None and not fault and (reasons or known.collapse is not None):
        correction = wanted
    if known.collapse is not None:
        limit = min((known.collapse + 1, *known.rolled_back))
        before = (each for each in known.checkpoints if each.step < limit)
        rollback = known.proposed or max(before, key=lambda each: each.step, default=None)
        if rollback is not None:
            goes_on = "" if correction is None else f" and go on with {correction.words}"
            return Remedy(
                "rollback", correction, rollback,
                f"The reward collapsed from step {known.collapse}: go back to the checkpoint of step {rollback.step}"
                f"{goes_on}.",
            )  # fmt: skip
        remark = " The reward has collapsed, and no checkpoint from before it is left to go back to." + remark
    static = finding(loop, settings)
    if static is not None:
        if (loop.static or 0.0) >= driven and not is_large:
            return Remedy("cause", correction, None, static + remark)
        remark += f" Besides, {static}"
    if correction is None:
        if not reasons and known.collapse is None:
            return Remedy()
        why = "".join(f"{each[0].upper()}{each[1:]}. " for each in reasons)
        return Remedy("cause", why=f"{why}No correction is advised: {fault}.{remark}")
    if not reasons:
        # It stays on, and nothing is to be said.
        return Remedy(correction=correction)
    decays = " and a lower rate" if _is_lowered(known.loop, known.settings) else ""
    words = correction.words[0].upper() + correction.words[1:]
    why = f"{words}{decays}: {' and '.join(reasons)}.{remark}"
    return Remedy("correction_and_decay" if decays else "correction", correction, None, why)


def finding(state: LoopState, settings: LoopSettings) -> str | None:
    """Return what the loop knows of a mismatch that the learning rate does not drive; None if there is none."""
    static = state.static
    if static is None or static <= settings.set_point or not (state.measured_static or not state.follows):
        return None
    how = "at lag 0, or before any update" if state.follows else "and did not fall with the learning rate"
    return (
        f"{static:.2g} nats per token of the mismatch are static: k3 is so high {how}. A lower learning rate would not "
        "help against it; find its cause by a probe, or correct the loss."
    )


def is_evaluated(loop: LoopState, settings: LoopSettings) -> bool:
    """Return whether the effect of a correction on the newest step is of interest."""
    return _is_lowered(loop, settings) or finding(loop, settings) is not None


def effective_sample(
    correction: Correction, statistics: ComparisonStatistics, summaries: RolloutSummaries
) -> float | None:
    """Return the effective sample that a correction would leave at its first usual threshold, a fraction of all.

    None with fewer whole rollouts than `LEAST_ROLLOUTS`.
    """
    if int(summaries.whole().sum()) < LEAST_ROLLOUTS:
        return None
    return Evaluator(statistics, summaries).evaluate(correction.kind).weights.effective_fraction


def _is_lowered(loop: LoopState, settings: LoopSettings) -> bool:
    return (loop.error > 0.0 or loop.log_scale < 0.0) and not loop.only_cools(settings)


def _wanted(known: Situation) -> tuple[Correction, str]:
    """Return the correction to switch on, and a sentence if the trainer asks for another one."""
    asked, default = known.asked, Correction.parse(DEFAULT_CORRECTION)
    if asked is None:
        return default, ""
    if known.correction is None and known.asked_ess is not None and known.asked_ess < LEAST_EFFECTIVE:
        left = percent(known.asked_ess)
        return default, f" {asked.words.capitalize()}, which the trainer asks for, would leave {left} of it."
    return asked, ""


def resume_command(trainer: str | None, checkpoint_path: str) -> str:
    """Return how a trainer of this description resumes from a checkpoint with this path below its root."""
    framework, folder = (trainer or "").partition(" ")[0], checkpoint_path.partition("/")[0]
    match framework:
        case "TRL":
            return f'trainer.train(resume_from_checkpoint="{checkpoint_path}")'
        case "verl":
            return f"trainer.resume_mode=resume_path trainer.resume_from_path={folder}"
        case _:
            return f"resume the trainer from {checkpoint_path}"
