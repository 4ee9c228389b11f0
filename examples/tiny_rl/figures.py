"""Print the figures of a recorded run as the table of its README.

python -m examples.tiny_rl.figures examples/tiny_rl/recorded
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.tiny_rl.record import RECORDED, RunRecord

STEPS_BETWEEN_ROWS = 20


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of one step; k3 is the mean of expm1(d) − d over all tokens in float64, d = log π − log μ."""

    step: int
    learning_rate: float
    reward: float
    response_length: float
    worked_share: float
    """Share of rollouts that write the running sums down: responses of more than five tokens."""
    entropy: float
    k3_kl: float
    max_abs_d: float


def figures_of_step(record: RunRecord, step: int) -> StepFigures:
    batch = record.rollouts(step)
    assert batch.reward is not None
    assert batch.entropy is not None
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    difference = batch.trainer_log_probs.astype(np.float64) - batch.rollout_log_probs.astype(np.float64)
    return StepFigures(
        step=step,
        learning_rate=record.scalars()[step]["lr"],
        reward=float(batch.reward.mean(dtype=np.float64)),
        response_length=float(batch.response_lengths.mean()),
        worked_share=float(np.mean(batch.response_lengths > 5)),
        entropy=float(batch.entropy.mean(dtype=np.float64)),
        k3_kl=float(np.mean(np.expm1(difference) - difference)),
        max_abs_d=float(np.abs(difference).max()),
    )


def table(record: RunRecord) -> str:
    """Return the first step, every twentieth and the last as a Markdown table."""
    steps = record.steps()
    shown = [step for step in steps if step in (steps[0], steps[-1]) or step % STEPS_BETWEEN_ROWS == 0]
    lines = [
        "| step | learning rate | reward | response length | worked | entropy | k3 | max abs d |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    return "\n".join(lines + [_row(figures_of_step(record, step)) for step in shown])


def _row(figures: StepFigures) -> str:
    return (
        f"| {figures.step} | {figures.learning_rate:.3g} | {figures.reward:.3f} | {figures.response_length:.1f} "
        f"| {figures.worked_share:.0%} | {figures.entropy:.3f} | {figures.k3_kl:.1e} | {figures.max_abs_d:.3f} |"
    )


if __name__ == "__main__":
    print(table(RunRecord(Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDED)))
