"""The comparison by layer that a worker makes of two scorers' distances."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from foreshock.layer_divergence import LayerComparison, compared_layers, count_groups
from foreshock.rollouts import decode_rollouts
from foreshock_probes.engines.protocol import ScoreCommand
from foreshock_probes.layer_divergence.states import ScorerDistances

__all__ = ["compare_layers"]


def compare_layers(
    step: int, commands: tuple[ScoreCommand, ScoreCommand], states: Path, run: Callable[[ScoreCommand], object]
) -> LayerComparison:
    """Return the comparison of the first command's scorer with the second one's, the reference.

    `run` runs a command in its engine. The file `states` is removed at the end.
    """
    parts = []
    try:
        for part, command in zip(("first", "second"), commands, strict=True):
            run(command.model_copy(update={"layers": part, "states": str(states)}))
            parts.append(ScorerDistances.decode(Path(command.scores).read_bytes()))
    finally:
        states.unlink(missing_ok=True)
    (compared, reference), pair = parts, parts[1].pair
    assert pair is not None
    with Path(commands[0].rollouts).open("rb") as file:
        rollouts = decode_rollouts(file)
    return LayerComparison(
        step=step,
        compared=commands[0].scorer,
        reference=commands[1].scorer,
        rollouts=int((pair.states > 0).sum()),
        groups=count_groups(pair, rollouts.group_ids),
        tokens=rollouts.num_tokens,
        states=int(pair.states.sum()),
        non_finite=pair.non_finite,
        layers=compared_layers(pair, compared.floor, reference.floor, rollouts.group_ids),
        compared_fingerprint=compared.fingerprint.to_dict(),
        reference_fingerprint=reference.fingerprint.to_dict(),
    )
