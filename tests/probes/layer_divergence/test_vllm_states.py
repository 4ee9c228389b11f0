"""Hidden states of vLLM's prefill by layer: against torch's with the same weights, and with those of another layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from foreshock.digests import weights_digest
from foreshock.layer_divergence import LayerComparison
from foreshock.rollouts import encode_rollouts
from foreshock.scorers import ENGINE_REPLAY, REFERENCE
from foreshock_probes.engines.process import EngineError, EnginePool
from foreshock_probes.engines.protocol import ScoreCommand
from foreshock_probes.layer_divergence.states import PART, compare_layers
from foreshock_probes.layer_divergence.vllm_states import SequencePlaces
from tests.probes.layer_divergence.test_torch_states import GROUPED, LAYERS, means, perturbed
from tests.probes.tiny import save_checkpoint

FLOAT32 = {"dtype": "float32"}


def numbers(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def test_parts_of_sequences_are_told_apart() -> None:
    places = SequencePlaces()
    places.add(np.array([5, 6, 7, 8], np.int32), numbers(-1, 10, 11, -1))
    places.add(np.array([5, 6, 9], np.int32), numbers(20, 21, -1))
    # The longest match decides: both begin with 5, 6.
    found = places.numbers_of(numbers(5, 6, 9, 5, 6), numbers(0, 1, 2, 0, 1))
    assert found.tolist() == [20, 21, -1, -1, 10]
    assert places.numbers_of(numbers(7, 8), numbers(2, 3)).tolist() == [11, -1]
    # What follows the last prompt is no part of one.
    assert places.numbers_of(numbers(3), numbers(4)).tolist() == [-1]


def test_part_that_the_budget_cuts_is_found_among_those_that_begin_as_it_does() -> None:
    places = SequencePlaces()
    places.add(np.array([5, 6, 7], np.int32), numbers(10, 11, -1))
    places.add(np.array([5, 8], np.int32), numbers(20, -1))
    assert places.numbers_of(numbers(5, 5, 6, 7), numbers(0, 0, 1, 2)).tolist() == [20, 10, 11, -1]
    assert places.numbers_of(numbers(8), numbers(1)).tolist() == [-1]


def test_parts_at_following_positions_are_told_apart() -> None:
    places = SequencePlaces()
    places.add(np.array([1, 2, 3], np.int32), numbers(10, 11, 12))
    places.add(np.array([4, 5], np.int32), numbers(20, 21))
    assert places.numbers_of(numbers(1), numbers(0)).tolist() == [10]
    assert places.numbers_of(numbers(4, 2, 3), numbers(0, 1, 2)).tolist() == [20, 11, 12]
    assert places.numbers_of(numbers(5), numbers(1)).tolist() == [21]


def test_equal_sequences_are_both_found() -> None:
    places = SequencePlaces()
    for number in (0, 1):
        places.add(np.array([4, 4], np.int32), numbers(number, -1))
    assert places.numbers_of(numbers(4, 4, 4, 4), numbers(0, 1, 0, 1)).tolist() == [0, -1, 1, -1]


def test_generated_tokens_are_no_states() -> None:
    places = SequencePlaces()
    places.add(np.array([4, 5], np.int32), numbers(0, 1))
    places.add(np.array([4, 6, 7], np.int32), numbers(2, 3, 4))
    assert places.numbers_of(numbers(4, 4, 5), numbers(0, 0, 1)).tolist() == [2, 0, 1]
    # A token that follows the first sequence, between the second one's part and what is no sequence's.
    assert places.numbers_of(numbers(9, 6, 7, 0), numbers(2, 1, 2, 0)).tolist() == [-1, 3, 4, -1]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("vllm-layers") / "plain", seed=3, num_hidden_layers=LAYERS)


def compared(
    engines: EnginePool, folder: Path, of_engine: Path, of_reference: Path, options: dict[str, Any]
) -> LayerComparison:
    """Compare vLLM's prefill with torch in float32, each with its own weights."""
    (folder / "rollouts").write_bytes(encode_rollouts(GROUPED))
    commands = [
        ScoreCommand(
            scorer=scorer,
            variant="",
            weights_folder=str(weights),
            weights_digest=weights_digest(weights),
            weights_version=None,
            options=chosen,
            accelerator="cpu",
            rollouts=str(folder / "rollouts"),
            scores=str(folder / "scores"),
            task=PART,
            arguments={"part": part, "states": str(folder / "states.npy")},
        )
        for part, scorer, weights, chosen in (
            ("first", ENGINE_REPLAY, of_engine, options),
            ("second", REFERENCE, of_reference, {}),
        )
    ]
    return compare_layers(1, commands, lambda command: engines.score(command, lambda tokens: None))


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_layer_with_other_weights_in_the_engine_stands_out(engines: EnginePool, weights: Path, tmp_path: Path) -> None:
    found = compared(engines, tmp_path, perturbed(weights, tmp_path / "other", 2), weights, FLOAT32)
    assert max(means(found)[:3]) < 1e-5
    assert min(means(found)[3:]) > 1e-4
    assert all(layer.departs for layer in found.layers[3:])


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_engine_and_torch_agree_at_every_layer_in_float32(engines: EnginePool, weights: Path, tmp_path: Path) -> None:
    found = compared(engines, tmp_path, weights, weights, FLOAT32)
    assert (found.states, found.non_finite) == (GROUPED.num_tokens, 0)
    # A shift by one token, or a state without its residual, would give distances near 1.
    assert len(means(found)) == LAYERS + 2
    assert means(found)[0] == 0.0
    assert max(means(found)) < 1e-5
    chunked = compared(engines, tmp_path, weights, weights, FLOAT32 | {"max_num_batched_tokens": 16})
    assert max(means(chunked)) < 1e-5
    assert found.compared_fingerprint["engine"] == "vllm"
    assert not (tmp_path / "states.npy").exists()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_bfloat16_engine_departs_at_once(engines: EnginePool, weights: Path, tmp_path: Path) -> None:
    found = compared(engines, tmp_path, weights, weights, {})
    assert found.departure is not None
    assert found.departure.layer == "embeddings"  # the weights are rounded
    assert 1e-3 < means(found)[0] < 1e-2


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_compiled_engine_is_refused(engines: EnginePool, weights: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="need tensor_parallel_size=1 and enforce_eager=true"):
        compared(engines, tmp_path, weights, weights, {"enforce_eager": False})
    assert not (tmp_path / "states.npy").exists()
