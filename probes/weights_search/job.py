"""A job's search: find the candidates' weights, replay through the worker's engine, return the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreshock.errors import WeightsError
from foreshock.rollouts import decode_rollouts, decode_scores
from foreshock.scorers import NOISE_FLOOR_VARIANT
from foreshock.weights_search import WeightsSearch
from foreshock_probes.engines.process import EngineError
from foreshock_probes.engines.protocol import ScoreCommand
from foreshock_probes.weights import AnnouncedCheckpoint, Weights, WeightsLibrary
from foreshock_probes.weights_search.assembly import NotComparableError
from foreshock_probes.weights_search.search import Candidate, Searcher

__all__ = ["search_weights"]


def search_weights(
    step: int,
    base: Weights,
    candidates: Sequence[AnnouncedCheckpoint],
    library: WeightsLibrary,
    template: ScoreCommand,
    scored: Mapping[str, bytes],
    score: Callable[[ScoreCommand], object],
    log: Callable[[str], None],
) -> WeightsSearch:
    """Search with the weights of `candidates` and return the result.

    `template` is the command that scored the announced weights `base`; `scored` has its scores by variant, as Parquet;
    `score` has a command done. Weights that are missing or refused, or that the engine cannot load, are skipped, with
    the reason in the result.

    Raises EngineError if an engine fails in a way that another try may not.
    """
    plain, rebatched = (decode_scores(scored[variant]).log_probs for variant in ("", NOISE_FLOOR_VARIANT))

    def replay(folder: Path, digest: str, *, fresh: bool) -> NDArray[np.float32]:
        weights = {"weights_folder": str(folder), "weights_digest": digest, "fresh": fresh}
        try:
            score(template.model_copy(update=weights))
        except EngineError as error:
            if error.kind == "final":
                raise NotComparableError(error.reason) from error
            raise
        return decode_scores(Path(template.scores).read_bytes()).log_probs

    searcher = Searcher(
        step=step,
        scorer=template.scorer,
        base=base,
        candidates=[_candidate(library, each) for each in candidates],
        batch=decode_rollouts(Path(template.rollouts).read_bytes()),
        replay=replay,
        folder=Path(template.scores).parent / "weights-search",
        log=log,
    )
    return searcher.run(plain, rebatched)


def _candidate(library: WeightsLibrary, checkpoint: AnnouncedCheckpoint) -> Candidate:
    try:
        return Candidate(checkpoint.step, library.find(checkpoint))
    except WeightsError as error:
        return Candidate(checkpoint.step, None, str(error))
