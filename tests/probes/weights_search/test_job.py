"""A search confirms its result in a fresh engine, and goes on when an engine cannot load one candidate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from foreshock.api.leases import JobWeightsRecord
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import RolloutBatch, ScoreBatch, encode_rollouts, encode_scores
from foreshock.weights_search import WeightsSearch
from foreshock_probes.engines.process import EngineError
from foreshock_probes.engines.protocol import ScoreCommand
from foreshock_probes.weights import WeightsLibrary
from foreshock_probes.weights_search.search import Candidate, search_weights
from tests.probes.weights_search.test_search import (
    HEAD,
    ROLLOUTS,
    STEP,
    TOKENS,
    Tensors,
    log_probs_of,
    save,
    tensors_of,
)


def search(tmp_path: Path, refuses: Callable[[ScoreCommand], EngineError | None]) -> WeightsSearch:
    """Search for a head of step 1 among steps 1 and 59; `refuses` returns the error of a command, None to score it."""
    batch = RolloutBatch.from_lists(
        [f"s{row}" for row in range(ROLLOUTS)],
        [[1]] * ROLLOUTS,
        [[1] * TOKENS] * ROLLOUTS,
        rollout_log_probs=np.split(log_probs_of(tensors_of(STEP) | {HEAD: tensors_of(1)[HEAD]}), ROLLOUTS),
    )
    rollouts, scores = tmp_path / "rollouts.parquet", tmp_path / "scores.parquet"
    rollouts.write_bytes(encode_rollouts(batch))
    digests = {step: save(tmp_path / "root" / str(step), tensors_of(step)).digest for step in (1, 59, STEP)}
    library = WeightsLibrary({"runs": tmp_path / "root"})
    base, *candidates = (
        Candidate(step, library.find(JobWeightsRecord(root="runs", path=str(step), digest=digests[step], step=step)))
        for step in (STEP, 59, 1)
    )
    assert base.weights is not None

    def encoded(weights: Tensors) -> bytes:
        made_by = Fingerprint(engine="vllm")
        return encode_scores(ScoreBatch(batch.sample_ids, log_probs_of(weights), batch.response_offsets, made_by))

    def score(command: ScoreCommand) -> None:
        error = refuses(command)
        if error is not None:
            raise error
        weights: Tensors = {}
        for path in Path(command.weights_folder).glob("*.safetensors"):
            weights |= load_file(path)
        scores.write_bytes(encoded(weights))

    template = ScoreCommand(
        scorer="vllm.prefill",
        variant="",
        weights_folder="",
        weights_digest="",
        weights_version=None,
        options={},
        accelerator="cpu",
        rollouts=str(rollouts),
        scores=str(scores),
    )
    plain = encoded(tensors_of(STEP))
    scored = {"": plain, "rebatched": plain}
    return search_weights(STEP, base.weights, candidates, template, scored, score, print)


def test_best_weights_are_confirmed_in_an_engine_that_never_held_others(tmp_path: Path) -> None:
    asked: list[bool] = []

    def refuses(command: ScoreCommand) -> None:
        asked.append(command.fresh)

    found = search(tmp_path, refuses)
    assert (found.done[0].step, found.done[0].part) == (1, "lm_head")
    assert found.best_is_confirmed
    assert asked[-1]
    assert not any(asked[:-1])


def test_candidate_that_the_engine_cannot_load_is_skipped(tmp_path: Path) -> None:
    def refuses(command: ScoreCommand) -> EngineError | None:
        of_59 = Path(command.weights_folder).name == "59"
        return EngineError("vLLM cannot load the checkpoint", "final") if of_59 else None

    found = search(tmp_path, refuses)
    skipped = {(each.step, each.part): each.skipped for each in found.replays if each.skipped}
    assert skipped == {(59, "all"): "vLLM cannot load the checkpoint"}
    assert (found.done[0].step, found.done[0].part) == (1, "lm_head")


def test_engine_that_crashes_ends_the_try(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="signal 9"):
        search(tmp_path, lambda command: EngineError("ended by signal 9", "retry"))
    assert not (tmp_path / "weights-search").exists()
