"""One scorer's part of a comparison by layer, in its engine's process."""

from __future__ import annotations

from pathlib import Path

from foreshock_probes.layer_divergence.states import ScorerDistances, compare_with_file, write_file
from foreshock_probes.scorers.request import Report, ScoreRequest, WarmModel
from foreshock_probes.scorers.table import scorer_named

__all__ = ["part_of_comparison"]


def part_of_comparison(
    request: ScoreRequest, states: Path, *, first: bool, warm: WarmModel, report: Report
) -> ScorerDistances:
    """Run the request's scorer: the first one writes the file `states`, the other one is compared with it.

    Raises UnsupportedScoreError if the scorer, or its model, gives no hidden states.
    """
    source = scorer_named(request.scorer).hidden_states()(request, warm)
    run = write_file if first else compare_with_file
    return run(source, request.rollouts, states, report)
