"""A comparison by layer: the tokens that have a state, the files of states, and their distances.

A scorer's process writes the states of a place of the network for all chosen tokens to a file, once in its own batches
and once in others for its noise floor. The worker computes the distances; only their means leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from foreshock.api.probes import ScorerRecord
from foreshock.api.records import to_json
from foreshock.comparisons import comparison_name
from foreshock.errors import ForeshockError
from foreshock.fingerprint import Fingerprint
from foreshock.layer_divergence import (
    LayerComparison,
    compared_layers,
    departure_in_words,
    departure_of,
    state_distances,
)
from foreshock.measures.inputs import group_names
from foreshock.measures.statistics.clusters import clusters_of
from foreshock.probe_kinds import LAYERS
from foreshock.rollouts import RolloutBatch
from foreshock.rollouts.arrays import rows_of_positions
from foreshock.scorers import SCORERS, VARIANTS
from foreshock_probes.offers import imported
from foreshock_probes.scorers.request import (
    Report,
    ScoreRequest,
    UnsupportedScoreError,
    WarmModel,
    read_arrays,
    write_arrays,
)
from foreshock_probes.scorers.tokens import known_states

if TYPE_CHECKING:
    from foreshock_probes.job_scoring import LeasedJob

PART = f"{__name__}:run_part"
"""The task of an engine that writes a scorer's states."""
STATES_BYTES = 1 << 30
"""Largest size of each of the four files of states, in memory twice; it holds 1,724 states of a model of 36 layers and
4,096 features."""
MOST_STATES = 1 << 16
_STATES_AT_ONCE = 1024  # states that are float64 at a time, for their distances

Float32 = NDArray[np.float32]
Observe = Callable[[int, NDArray[np.int64], Float32], None]
"""Called with a place of the network, numbers [k] of the chosen states, and these states [k, H]."""


class StatesMissingError(ForeshockError):
    """The model did not compute a state, or computed it twice, so the distances would be wrong."""


class HiddenStates(Protocol):
    """A scorer's hidden states of the request's rollouts, in the batches of the request's variant."""

    places: int
    """Number of places of the network: its layers, the embeddings and the input of the head."""
    size: int
    """H, the number of features of a state."""
    fingerprint: Fingerprint

    def run(self, numbers: NDArray[np.int64], observe: Observe, report: Report) -> None:
        """Pass `observe` the chosen states at every place; `numbers` [T] are those of the states before the response
        tokens, −1: not chosen."""


def chosen_states(rollouts: RolloutBatch, places: int, size: int) -> NDArray[np.int64]:
    """Return the response tokens [M], ascending, whose states are compared.

    These are the tokens that the model sampled and that have a state before them, or an even selection of these if a
    file would otherwise exceed STATES_BYTES. Raises UnsupportedScoreError if there is none.
    """
    tokens = np.flatnonzero(known_states(rollouts) & rollouts.generated)
    if not tokens.size:
        raise UnsupportedScoreError("there are no tokens to compare hidden states at")
    most = max(1, min(MOST_STATES, STATES_BYTES // (4 * places * size)))
    return tokens if tokens.size <= most else tokens[np.arange(most) * tokens.size // most]


def observed_states(source: HiddenStates, rollouts: RolloutBatch, report: Report) -> Float32:
    """Return the source's chosen states [P, M, H]. Raises StatesMissingError."""
    tokens = chosen_states(rollouts, source.places, source.size)
    numbers = np.full(rollouts.num_tokens, -1, np.int64)
    numbers[tokens] = np.arange(tokens.size)
    found = np.empty((source.places, tokens.size, source.size), np.float32)
    times = np.zeros(found.shape[:2], np.uint8)

    def observe(place: int, at: NDArray[np.int64], states: Float32) -> None:
        times[place, at] += 1
        found[place, at] = states

    source.run(numbers, observe, report)
    if (wrong := int(np.count_nonzero(times != 1))) > 0:
        raise StatesMissingError(
            f"{wrong} of {times.size} hidden states did not come once: this model, or this release of its engine, "
            "computes its layers in another way"
        )
    return found


def run_part(request: ScoreRequest, warm: WarmModel, report: Report) -> None:
    """Write the scorer's states as a task of its engine.

    Raises UnsupportedScoreError if the scorer or its model provides no hidden states.
    """
    named = SCORERS[request.scorer].hidden_states
    if named is None:
        raise UnsupportedScoreError(
            f"{request.scorer} gives no hidden states; scorers that do: {', '.join(LAYERS.usable_scorers())}"
        )
    source: HiddenStates = imported(named)(request, warm)
    write_arrays(request.result, source.fingerprint, states=observed_states(source, request.rollouts, report))


def run_job(job: LeasedJob) -> dict[str, Any]:
    """Compare the job's first scorer with its second one, the reference, and return the comparison."""
    names = [each.scorer for each in job.job.scorers]
    asked = [ScorerRecord(scorer=name, variant=variant) for name in names for variant in VARIANTS]
    tasks = [job.task(each, f"states-{number}.safetensors", PART) for number, each in enumerate(asked)]
    paths = job.run_tasks(tasks, lambda task: task.result, "layers")
    found = compare_layers(job.job.step, job.rollouts(), dict(zip(names, (paths[:2], paths[2:]), strict=True)))
    job.log(found.sentence)
    return to_json(found)


def compare_layers(step: int, rollouts: RolloutBatch, files: Mapping[str, Sequence[Path]]) -> LayerComparison:
    """Return the comparison of the first scorer of `files` with the second one, the reference.

    `files` has each scorer's states in its own batches and in others. Raises UnsupportedScoreError if the two have
    other numbers of layers or features.
    """
    (compared, (first, floor_of_first, made_first)), (reference, (second, floor_of_second, made_second)) = (
        (name, _read(*paths)) for name, paths in files.items()
    )
    if first.shape != second.shape:
        raise UnsupportedScoreError(
            f"the two scorers have other networks: {first.shape[0] - 2} layers of {first.shape[2]} features and "
            f"{second.shape[0] - 2} of {second.shape[2]}"
        )
    pair = _distances(first, second)
    tokens = chosen_states(rollouts, first.shape[0], first.shape[2])
    rows = rows_of_positions(rollouts.response_offsets, tokens)
    groups = clusters_of(group_names(rollouts.group_ids, rollouts.num_rollouts))[rows]
    finite = np.isfinite(pair).all(axis=0)
    layers, count = compared_layers(pair, floor_of_first, floor_of_second, groups), np.unique(groups[finite]).size
    return LayerComparison(
        step=step,
        pair=comparison_name(compared, reference),
        compared=compared,
        reference=reference,
        rollouts=np.unique(rows[finite]).size,
        groups=count,
        tokens=rollouts.num_tokens,
        states=int(finite.sum()),
        non_finite=int((~finite).sum()),
        departure=departure_of(layers),
        sentence=departure_in_words(layers, compared, reference, count),
        layers=layers,
        compared_fingerprint=made_first.to_dict(),
        reference_fingerprint=made_second.to_dict(),
    )


def _read(plain: Path, rebatched: Path) -> tuple[Float32, NDArray[np.float64], Fingerprint]:
    """Return a scorer's states, their distances [P, M] from those in other batches, and its fingerprint."""
    found, fingerprint = read_arrays(plain)
    return found["states"], _distances(read_arrays(rebatched)[0]["states"], found["states"]), fingerprint


def _distances(states: Float32, reference: Float32) -> NDArray[np.float64]:
    """Return the distances [P, M] of states [P, M, H] from those of the reference."""
    found = np.empty(states.shape[:2])
    for place in range(states.shape[0]):
        for start in range(0, states.shape[1], _STATES_AT_ONCE):
            part = slice(start, start + _STATES_AT_ONCE)
            found[place, part] = state_distances(states[place, part], reference[place, part])
    return found
