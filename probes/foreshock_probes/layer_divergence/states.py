"""A comparison by layer: the tokens that have a state, the file that keeps one scorer's states, and the distances.

An observer gets a scorer's states batch by batch, place by place. Those of the first scorer are written to the file.
Each scorer then runs again in other batches for its noise floor; these states are compared and dropped. The memory is
one batch; the file holds one scorer's states.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from foreshock.errors import ForeshockError
from foreshock.fingerprint import Fingerprint
from foreshock.layer_divergence import DistanceSums, LayerComparison, compared_layers, count_groups, state_distances
from foreshock.probe_kinds import LAYERS
from foreshock.rollouts import RolloutBatch, decode_rollouts
from foreshock.scorers import NOISE_FLOOR_VARIANT, SCORERS
from foreshock_probes.offers import imported
from foreshock_probes.scorers.request import Report, ScoreRequest, UnsupportedScoreError, WarmModel, write_result
from foreshock_probes.scorers.tokens import known_states

if TYPE_CHECKING:
    from foreshock_probes.engines.protocol import ScoreCommand
    from foreshock_probes.job_scoring import LeasedJob

PART = f"{__name__}:run_part"
"""The task of an engine that does one scorer's part."""
STATES_BYTES = 2 << 30
"""Largest size of the file; it holds 3,456 states of a model of 36 layers and 4,096 features."""
MOST_STATES = 1 << 16
_STATES_AT_ONCE = 1024  # states that are float64 at a time, for their distances

Float32 = NDArray[np.float32]
Observe = Callable[[int, NDArray[np.int64], Float32], None]
"""Called with a place of the network, numbers [k] of the chosen states, and these states [k, H]."""


class StatesMissingError(ForeshockError):
    """The model did not compute a state, or computed it twice, so the distances would be wrong."""


class HiddenStates(Protocol):
    """A scorer's hidden states of the request's rollouts."""

    places: int
    """Number of places of the network: its layers, the embeddings and the input of the head."""
    size: int
    """H, the number of features of a state."""
    fingerprint: Fingerprint

    def run(self, variant: str, tokens: NDArray[np.int64], observe: Observe, report: Report) -> None:
        """Pass `observe` the states before the response tokens `tokens` [M] (ascending indices) at every place.

        `variant`: the plain batch composition or that of the noise floor. `report` gets the number of response tokens
        done.
        """


@dataclass(frozen=True, slots=True)
class ScorerDistances:
    """The result of one scorer's run: its noise floor, and its distances from the previous scorer (None: the first)."""

    floor: DistanceSums
    pair: DistanceSums | None
    fingerprint: Fingerprint

    def encode(self) -> bytes:
        """Return the distances as a file of numpy."""
        arrays: dict[str, NDArray[np.generic]] = {}
        for name, sums in (("floor", self.floor), ("pair", self.pair)):
            if sums is not None:
                arrays |= {f"{name}.{field.name}": np.asarray(getattr(sums, field.name)) for field in fields(sums)}
        file = io.BytesIO()
        np.savez(file, fingerprint=np.array(self.fingerprint.to_json()), **arrays)  # type: ignore[arg-type]
        return file.getvalue()

    @classmethod
    def decode(cls, data: bytes) -> ScorerDistances:
        """Return the distances that `encode` wrote."""
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            found = {}
            for name in ("floor", "pair"):
                values = {field.name: file.get(f"{name}.{field.name}") for field in fields(DistanceSums)}
                known = values["states"] is not None
                found[name] = DistanceSums(**values | {"non_finite": int(values["non_finite"])}) if known else None
            assert found["floor"] is not None
            return cls(found["floor"], found["pair"], Fingerprint.from_json(str(file["fingerprint"])))


def chosen_states(rollouts: RolloutBatch, places: int, size: int) -> NDArray[np.int64]:
    """Return the response tokens [M], ascending, whose states are compared.

    These are the tokens that the model sampled and that have a state before them, or an even selection of these if the
    file would otherwise exceed STATES_BYTES. Raises UnsupportedScoreError if there is none.
    """
    tokens = np.flatnonzero(known_states(rollouts) & rollouts.generated)
    if not tokens.size:
        raise UnsupportedScoreError("there are no tokens to compare hidden states at")
    most = max(1, min(MOST_STATES, STATES_BYTES // (4 * places * size)))
    return tokens if tokens.size <= most else tokens[np.arange(most) * tokens.size // most]


def write_file(source: HiddenStates, rollouts: RolloutBatch, path: Path, report: Report) -> ScorerDistances:
    """Write the source's states to the file `path` and return its noise floor."""
    tokens = chosen_states(rollouts, source.places, source.size)
    shape = (source.places, tokens.size, source.size)
    kept = _open(path, "w+", shape)
    seen = _Seen(source.places, tokens.size)

    def observe(place: int, at: NDArray[np.int64], states: Float32) -> None:
        seen.add(place, at)
        kept[place, at] = states

    source.run("", tokens, observe, lambda done: report(done // 2))
    seen.check()
    floor = _floor(source, rollouts, tokens, kept, report)
    return ScorerDistances(floor, None, source.fingerprint)


def compare_with_file(source: HiddenStates, rollouts: RolloutBatch, path: Path, report: Report) -> ScorerDistances:
    """Return the distances of the states in the file from the source's (the reference), and the source's noise floor.

    Afterwards the file holds the states of the source. Raises UnsupportedScoreError if their layers or sizes differ.
    """
    kept = _open(path, "r+", None)
    if (kept.shape[0], kept.shape[2]) != (source.places, source.size):
        raise UnsupportedScoreError(
            f"the two scorers have other networks: {kept.shape[0] - 2} layers of {kept.shape[2]} features and "
            f"{source.places - 2} of {source.size}"
        )
    tokens = chosen_states(rollouts, source.places, source.size)
    distances = _Distances(source.places, tokens.size)

    def observe(place: int, at: NDArray[np.int64], states: Float32) -> None:
        distances.add(place, at, kept[place, at], states)
        kept[place, at] = states

    source.run("", tokens, observe, lambda done: report(done // 2))
    pair = distances.sums(rollouts, tokens)
    return ScorerDistances(_floor(source, rollouts, tokens, kept, report), pair, source.fingerprint)


def _open(path: Path, mode: str, shape: tuple[int, int, int] | None) -> Float32:
    """Return the states in the file [places, states, H], mapped into memory."""
    mapped: Float32 = np.lib.format.open_memmap(path, mode=mode, dtype=np.float32, shape=shape)  # type: ignore[no-untyped-call]
    return mapped


def _floor(
    source: HiddenStates, rollouts: RolloutBatch, tokens: NDArray[np.int64], kept: Float32, report: Report
) -> DistanceSums:
    """Return the distances of the source in other batches from its states in `kept`."""
    distances = _Distances(source.places, tokens.size)

    def observe(place: int, at: NDArray[np.int64], states: Float32) -> None:
        distances.add(place, at, states, kept[place, at])

    source.run(NOISE_FLOOR_VARIANT, tokens, observe, lambda done: report((rollouts.num_tokens + done) // 2))
    return distances.sums(rollouts, tokens)


class _Seen:
    """Checks that each state came exactly once."""

    def __init__(self, places: int, states: int) -> None:
        self._times = np.zeros((places, states), np.uint8)

    def add(self, place: int, at: NDArray[np.int64]) -> None:
        self._times[place, at] += 1

    def check(self) -> None:
        wrong = int(np.count_nonzero(self._times != 1))
        if wrong:
            raise StatesMissingError(
                f"{wrong} of {self._times.size} hidden states did not come once: this model, or this release of its "
                "engine, computes its layers in another way"
            )


class _Distances:
    """Collects the distances of all states at all places."""

    def __init__(self, places: int, states: int) -> None:
        self._seen = _Seen(places, states)
        self._relative, self._cosine = np.full((2, places, states), np.nan)

    def add(self, place: int, at: NDArray[np.int64], states: Float32, reference: Float32) -> None:
        self._seen.add(place, at)
        for start in range(0, at.size, _STATES_AT_ONCE):
            part = slice(start, start + _STATES_AT_ONCE)
            found = state_distances(states[part], reference[part])
            self._relative[place, at[part]], self._cosine[place, at[part]] = found

    def sums(self, rollouts: RolloutBatch, tokens: NDArray[np.int64]) -> DistanceSums:
        """Return the sums per rollout. Raises StatesMissingError."""
        self._seen.check()
        rows = np.searchsorted(rollouts.response_offsets, tokens, side="right").astype(np.int64) - 1
        return DistanceSums.of_states(self._relative, self._cosine, rows, rollouts.num_rollouts)


def run_part(
    request: ScoreRequest, arguments: Mapping[str, str], result: Path, warm: WarmModel, report: Report
) -> None:
    """Do one scorer's part as a task of its engine: the first writes the file `states`, the second is compared with it.

    Raises UnsupportedScoreError if the scorer or its model provides no hidden states.
    """
    named = SCORERS[request.scorer].hidden_states
    if named is None:
        raise UnsupportedScoreError(
            f"{request.scorer} gives no hidden states; scorers that do: {', '.join(LAYERS.usable_scorers())}"
        )
    source: HiddenStates = imported(named)(request, warm)
    run = write_file if arguments["part"] == "first" else compare_with_file
    write_result(run(source, request.rollouts, Path(arguments["states"]), report).encode(), result)


def run_job(job: LeasedJob) -> dict[str, Any]:
    """Compare the job's first scorer with its second one, the reference, and return the comparison."""
    states = job.folder / "states.npy"
    commands = [
        job.command(requested, PART, part=part, states=str(states))
        for part, requested in zip(("first", "second"), job.job.scorers, strict=True)
    ]
    found = compare_layers(job.job.step, commands, lambda each: job.run_engine(each, f"layers: {each.scorer}"))
    job.log(found.in_words())
    return found.to_dict()


def compare_layers(
    step: int, commands: Sequence[ScoreCommand], run: Callable[[ScoreCommand], object]
) -> LayerComparison:
    """Return the comparison of the first command's scorer with the second one's, the reference.

    `run` runs a command in its engine. The file of states is removed at the end.
    """
    parts = []
    try:
        for command in commands:
            run(command)
            parts.append(ScorerDistances.decode(Path(command.scores).read_bytes()))
    finally:
        Path(commands[0].arguments["states"]).unlink(missing_ok=True)
    (compared, reference), pair = parts, parts[1].pair
    assert pair is not None
    rollouts = decode_rollouts(Path(commands[0].rollouts).read_bytes())
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
