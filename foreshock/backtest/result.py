"""Everything that a backtest finds, with its JSON form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foreshock.backtest.applied import lost_learning_rate, scales_under_apply
from foreshock.backtest.clocks import compared
from foreshock.backtest.replay import RecordedRun, replay_run
from foreshock.backtest.roc import RocPoint, roc_points
from foreshock.backtest.scoring import Score, scores_of
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration


@dataclass(frozen=True, slots=True)
class RunResult:
    """A replayed run, and the share of its Σ η that the advice would have taken away in `apply` mode."""

    run: RecordedRun
    lost: float

    def to_json(self) -> dict[str, Any]:
        run = self.run
        return {
            "name": run.name,
            "steps": len(run.steps),
            "collapse": run.collapse,
            "usable": run.usable,
            "learning_rate_sum_lost": self.lost,
            "episodes": [
                {"rule": each.rule, "severity": each.severity, "start": each.start, "end": each.end}
                for each in run.episodes
            ],
        }


@dataclass(frozen=True, slots=True)
class BacktestResult:
    """The runs, the scores of the rules and of what they are compared with, and the ROC of every rule."""

    runs: tuple[RunResult, ...]
    rules: tuple[Score, ...]
    baselines: tuple[Score, ...]
    roc: tuple[RocPoint, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": [each.to_json() for each in self.runs],
            "rules": [each.to_json() for each in self.rules],
            "baselines": [each.to_json() for each in self.baselines],
            "roc": [each.to_json() for each in self.roc],
        }


def backtest(
    names: Sequence[str],
    steps: Sequence[Sequence[ClosedStep]],
    configuration: WarningConfiguration,
    floor: float | None = None,
) -> BacktestResult:
    """Replay the runs, one sequence of steps for each name. ``floor``: the reward of a policy that learned nothing."""
    runs = [replay_run(name, each, configuration, floor) for name, each in zip(names, steps, strict=True)]
    lost = [lost_learning_rate(each, scales_under_apply(each, configuration)) for each in steps]
    return BacktestResult(
        tuple(RunResult(*each) for each in zip(runs, lost, strict=True)),
        tuple(scores_of(runs)),
        tuple(compared(runs, steps)),
        tuple(roc_points(names, steps, configuration, floor)),
    )
