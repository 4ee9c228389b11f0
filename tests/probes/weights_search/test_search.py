"""The search finds what an engine held, among real files of a made model, and says what it skipped and why.

The model's log-probs are a fixed linear function of its tensors: any mixture of checkpoints has values of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from foreshock.digests import weights_digest
from foreshock.rollouts import RolloutBatch
from foreshock.weights_search import WeightsReplay, WeightsSearch, interleaved
from foreshock_probes.weights import Weights
from foreshock_probes.weights_search.search import MOST_REPLAYS, Candidate, Searcher

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHAPES = {EMBEDDINGS: (4, 3), HEAD: (4, 3), "model.norm.weight": (3,)} | {
    f"model.layers.{layer}.mlp.weight": (3, 3) for layer in range(4)
}
ROLLOUTS, TOKENS = 8, 5
STEP = 60

Tensors = dict[str, NDArray[np.float32]]


def tensors_of(step: int, *, tied: bool = False) -> Tensors:
    """Return the weights of a step; without a head if it is tied."""
    random = np.random.default_rng(step)
    made = {name: random.normal(0, 1, shape).astype(np.float32) for name, shape in SHAPES.items()}
    return {name: value for name, value in made.items() if not (tied and name == HEAD)}


def save(folder: Path, tensors: Mapping[str, NDArray[np.float32]], *, tied: bool = False) -> Weights:
    """Save a checkpoint in two files and return it as verified weights."""
    folder.mkdir(parents=True)
    names = sorted(tensors)
    for number, part in enumerate((names[:3], names[3:])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors")
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    details = sorted(folder.iterdir())
    stamp = tuple((path.name, (s := path.stat()).st_size, s.st_ino, s.st_mtime_ns) for path in details)
    return Weights(folder, weights_digest(folder), None, stamp)


def log_probs_of(tensors: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return the made model's log-probs, [T]."""
    total = np.zeros(ROLLOUTS * TOKENS)
    for name in SHAPES:
        basis = np.random.default_rng(len(name) * 31 + ord(name[-12])).normal(0, 0.02, (total.size, tensors[name].size))
        total += basis @ tensors[name].reshape(-1)
    return (total - 2.0).astype(np.float32)


class FakeEngine:
    """Replays with the weights of a folder, as an engine that follows the rules of tied embeddings does."""

    def __init__(self) -> None:
        self.started: list[Path] = []

    def __call__(self, folder: Path, digest: str, *, fresh: bool) -> NDArray[np.float32]:
        found: Tensors = {}
        for path in sorted(folder.glob("*.safetensors")):
            found |= load_file(path)
        if json.loads((folder / "config.json").read_text())["tie_word_embeddings"]:
            assert fresh, "a tied head cannot be exchanged in place"
            found[HEAD] = found[EMBEDDINGS]
        if fresh:
            self.started.append(folder)
        return log_probs_of(found)


def search(
    tmp_path: Path,
    held: Mapping[str, NDArray[np.float32]],
    candidates: list[Candidate],
    *,
    tied: bool = False,
    engine: FakeEngine | None = None,
) -> WeightsSearch:
    """Search for what an engine held that sampled step 60."""
    base = save(tmp_path / "announced", tensors_of(STEP, tied=tied), tied=tied)
    ids = [[1] * TOKENS] * ROLLOUTS
    sampled = log_probs_of(held)
    batch = RolloutBatch.from_lists(
        [f"s{row}" for row in range(ROLLOUTS)],
        [[1]] * ROLLOUTS,
        ids,
        rollout_log_probs=np.split(sampled, ROLLOUTS),
        group_ids=[f"g{row // 2}" for row in range(ROLLOUTS)],
    )
    replay = engine or FakeEngine()
    announced = tensors_of(STEP, tied=tied)
    plain = log_probs_of(announced | ({HEAD: announced[EMBEDDINGS]} if tied else {}))
    searcher = Searcher(STEP, "vllm.prefill", base, candidates, batch, replay, tmp_path / "work", log=lambda line: None)
    found = searcher.run(plain, plain)
    assert not (tmp_path / "work").exists()
    return found


@pytest.fixture
def candidates(tmp_path: Path) -> list[Candidate]:
    return [Candidate(step, save(tmp_path / str(step), tensors_of(step))) for step in (59, 1, 30)]


CASES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "whole": (59, "all", tuple(SHAPES)),
    "head": (1, "lm_head", (HEAD,)),
    "embeddings": (30, "embeddings", (EMBEDDINGS,)),
    "all layers": (1, "layers", tuple(f"model.layers.{layer}.mlp.weight" for layer in range(4))),
    "final norm": (59, "other", ("model.norm.weight",)),
    "last pipeline stage": (1, "lm_head+other", (HEAD, "model.norm.weight")),
    "half of the layers": (59, "layers.2-3", ("model.layers.2.mlp.weight", "model.layers.3.mlp.weight")),
    "one layer": (30, "layers.1", ("model.layers.1.mlp.weight",)),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_engine_held_is_found_and_confirmed(case: str, tmp_path: Path, candidates: list[Candidate]) -> None:
    step, part, names = CASES[case]
    old = tensors_of(step)
    engine = FakeEngine()
    found = search(tmp_path, tensors_of(STEP) | {name: old[name] for name in names}, candidates, engine=engine)
    best = found.done[0]
    assert (best.step, best.part, best.k3_kl) == (step, part, 0.0)
    assert found.as_good_as(best) == ()
    assert found.best_is_confirmed
    assert found.ended == f"a replay is at the noise floor: {found.describe(best)}"
    # Only the confirmation starts an engine: the others exchange the weights of the one that scored.
    assert len(engine.started) == 1


def test_announced_weights_end_the_search_at_once(tmp_path: Path, candidates: list[Candidate]) -> None:
    engine = FakeEngine()
    found = search(tmp_path, tensors_of(STEP), candidates, engine=engine)
    assert [found.is_announced(each) for each in found.replays] == [True]
    assert (found.ended, engine.started) == ("the announced weights are at the noise floor", [])


def test_unknown_weights_end_with_all_replays_made(tmp_path: Path, candidates: list[Candidate]) -> None:
    found = search(tmp_path, tensors_of(17), candidates)
    assert found.ended == "all candidates were replayed"
    assert not any(found.reproduces(each) for each in found.replays)
    assert len(found.done) <= MOST_REPLAYS
    assert {each.part for each in found.replays} >= {"all", "lm_head", "embeddings", "layers", "layers.3"}


def test_number_of_replays_is_bounded(tmp_path: Path) -> None:
    many = [Candidate(step, save(tmp_path / str(step), tensors_of(step))) for step in range(12)]
    found = search(tmp_path, tensors_of(17), many)
    assert (len(found.done), found.ended) == (MOST_REPLAYS, "64 replays were made, the most of one search")


def test_parts_with_equal_values_are_replayed_once(tmp_path: Path) -> None:
    frozen = {EMBEDDINGS: tensors_of(STEP)[EMBEDDINGS]}
    with_head_of_1 = tensors_of(30) | frozen | {HEAD: tensors_of(1)[HEAD]}
    candidates = [
        Candidate(1, save(tmp_path / "1", tensors_of(1) | frozen)),
        Candidate(30, save(tmp_path / "30", with_head_of_1)),
    ]
    found = search(tmp_path, tensors_of(17), candidates)
    skipped = {(each.step, each.part): each.skipped for each in found.replays if each.skipped}
    assert skipped[1, "embeddings"] == "the same values as at step 60"
    assert skipped[30, "lm_head"] == "the same values as at step 1"
    assert not any((each.step, each.part) in skipped for each in found.done)


def test_unusable_candidates_are_skipped_with_their_reason(tmp_path: Path, candidates: list[Candidate]) -> None:
    wider = {name: value for name, value in tensors_of(2).items() if name != HEAD}
    odd = Candidate(2, save(tmp_path / "wider", wider | {HEAD: np.zeros((5, 3), np.float32)}))
    deeper = tensors_of(3) | {"model.layers.4.mlp.weight": np.zeros((3, 3), np.float32)}
    longer = Candidate(3, save(tmp_path / "deeper", deeper))
    broken = Candidate(4, save(tmp_path / "broken", tensors_of(4)))
    (tmp_path / "broken" / "model-0.safetensors").write_bytes(b"\xff" * 64)
    gone = Candidate(5, None, "there are no weights of step 5")
    found = search(tmp_path, tensors_of(1), [odd, longer, broken, gone, *candidates])
    reasons = {each.step: each.skipped for each in found.replays if each.skipped and each.part == "all"}
    assert "'lm_head.weight' has the shape [5, 3], expected [4, 3]" in reasons[2]
    assert "only one of the two checkpoints has the tensor 'model.layers.4.mlp.weight'" in reasons[3]
    assert "the header of 'model-0.safetensors' is not one of safetensors" in reasons[4]
    assert reasons[5] == "there are no weights of step 5"
    assert (found.done[0].step, found.done[0].part) == (1, "all")


def test_nothing_but_unusable_candidates_ends_without_a_replay(tmp_path: Path) -> None:
    found = search(tmp_path, tensors_of(1), [Candidate(5, None, "gone")])
    assert (found.others, found.ended) == ((), "no other weights could be replayed")


def test_weights_that_are_replaced_during_the_search_end_it(tmp_path: Path, candidates: list[Candidate]) -> None:
    class Trainer(FakeEngine):
        def __call__(self, folder: Path, digest: str, *, fresh: bool) -> NDArray[np.float32]:
            (tmp_path / "59" / "config.json").write_text("{}")
            return super().__call__(tmp_path / "30", digest, fresh=fresh)

    found = search(tmp_path, tensors_of(1), candidates, engine=Trainer())
    assert found.ended.startswith("it could not go on: the files in '59' changed during scoring")


@pytest.mark.parametrize(("part", "names"), [("embeddings", (EMBEDDINGS, HEAD)), ("lm_head", (HEAD,))])
def test_tied_embeddings_are_one_part_and_a_head_may_have_kept_a_copy(
    part: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    candidates = [
        Candidate(step, save(tmp_path / str(step), tensors_of(step, tied=True), tied=True)) for step in (59, 1)
    ]
    new, old = (weights | {HEAD: weights[EMBEDDINGS]} for weights in (tensors_of(STEP), tensors_of(1)))
    engine = FakeEngine()
    found = search(tmp_path, new | {name: old[name] for name in names}, candidates, tied=True, engine=engine)
    assert found.tied
    assert (found.done[0].step, found.done[0].part, found.done[0].k3_kl) == (1, part, 0.0)
    assert found.best_is_confirmed


def test_nearest_and_first_steps_are_tried_first() -> None:
    assert interleaved([1, 10, 20, 30, 40, 50], 4) == [50, 1, 40, 10]
    assert interleaved([7], 8) == [7]
    assert interleaved([], 8) == []


def test_replay_that_was_not_made_is_never_the_best() -> None:
    search = WeightsSearch(3, "vllm.prefill", 1, 1, replays=(WeightsReplay(3, "all", 0.1), WeightsReplay(2, "all")))
    assert [each.step for each in search.done] == [3]
    assert search.others == ()
