"""A model divided among two real processes has the log-probs of the undivided one, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from foreshock.digests import weights_digest
from foreshock.rollouts import BatchAttributes, RolloutBatch
from foreshock_probes.engines.process import EngineError
from foreshock_probes.offers import load_scorer
from foreshock_probes.scorers.rank_processes import RankProcesses, device_count
from foreshock_probes.scorers.request import Scored, ScoreRequest, UnsupportedScoreError, WarmModel
from tests.probes.replaying import Replayer
from tests.probes.scorers.rank_tasks import count_parameters
from tests.probes.tiny import VOCABULARY, make_rollouts, save_checkpoint, save_mixture_of_experts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(device_count() < 2, reason="needs two devices"),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[WarmModel]:
    """Two ranks, started by the first score and kept for the others."""
    warm = WarmModel()
    yield warm
    warm.drop()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with the threads of a rank: sums may depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def score(
    folder: Path, rollouts: RolloutBatch, scorer: str, warm: WarmModel | None = None, variant: str = "", **options: Any
) -> Scored:
    request = ScoreRequest(scorer, variant, rollouts, folder, weights_digest(folder), 7, options)
    return load_scorer(scorer)(request, warm or WarmModel(), lambda tokens: None)


@pytest.mark.parametrize(
    ("scorer", "options"),
    [
        ("torch.float32", {}),
        ("torch.bfloat16", {"batch_size": 3}),
        ("torch.trainer", {"batch_size": 4, "padding": "left"}),
        ("torch.trainer", {"batch_size": 3, "head_dtype": "float32", "padding": "none"}),
        ("torch.float32", {"batch_size": 2, "logits_bytes": 10 * VOCABULARY * 7}),
    ],
)
def test_log_probs_are_those_of_the_undivided_model(
    ranks: WarmModel, checkpoints: Path, scorer: str, options: dict[str, Any]
) -> None:
    attributes = BatchAttributes(logprobs_mode="processed_logprobs")
    rollouts = make_rollouts(17, attributes=attributes, temperature=[0.5] * 8 + [1.0] * 9)
    whole = score(checkpoints / "first", rollouts, scorer, **options)
    divided = score(checkpoints / "first", rollouts, scorer, ranks, shards=2, **options)
    assert np.isfinite(whole.log_probs).all()
    np.testing.assert_array_equal(divided.log_probs, whole.log_probs)
    assert divided.fingerprint.flags["shards"] == "2"
    assert divided.fingerprint.batch_composition == whole.fingerprint.batch_composition


@pytest.mark.parametrize("model", ["tied head", "stacked experts", "other weights"])
def test_every_parameter_is_read(ranks: WarmModel, tmp_path: Path, checkpoints: Path, model: str) -> None:
    folder = checkpoints / "second"
    if model == "tied head":
        folder = save_checkpoint(tmp_path / "tied", seed=3, tie_word_embeddings=True)
    elif model == "stacked experts":
        folder = save_mixture_of_experts(tmp_path / "experts", seed=4)
    rollouts = make_rollouts(9)
    whole = score(folder, rollouts, "torch.float32").log_probs
    divided = score(folder, rollouts, "torch.float32", ranks, shards=2).log_probs
    np.testing.assert_array_equal(divided, whole)


def test_rollouts_without_log_probs_and_fewer_batches_than_ranks(ranks: WarmModel, checkpoints: Path) -> None:
    rollouts = RolloutBatch.from_lists(["a", "b", "c", "d"], [[], [3], [4], []], [[5, 6], [], [7], [8]])
    divided = score(checkpoints / "first", rollouts, "torch.float32", ranks, shards=2, batch_size=1).log_probs
    assert np.isnan(divided).tolist() == [True, False, False, True]
    together = score(checkpoints / "first", rollouts, "torch.float32", ranks, shards=2).log_probs
    np.testing.assert_allclose(divided, together, atol=2e-5)


def test_a_process_holds_its_part_and_the_head(checkpoints: Path) -> None:
    ranks = RankProcesses(2, count_parameters, on_gpus=False)
    try:
        counts = ranks.run(checkpoints / "first", lambda done: None)
    finally:
        ranks.close()
    for held, head, whole in counts:
        assert held == (whole - head) / 2 + head
        assert head < whole / 4


def test_checkpoints_that_do_not_have_a_parameter_are_refused(
    ranks: WarmModel, checkpoints: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "incomplete"
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoints / "first" / "config.json").read_bytes())
    parameters = load_file(checkpoints / "first" / "model.safetensors")
    del parameters["model.norm.weight"]
    save_file(parameters, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedScoreError, match=r"no tensor 'model\.norm\.weight'"):
        score(folder, make_rollouts(2), "torch.float32", ranks, shards=2)


def test_a_worker_with_too_few_devices_gives_the_job_back(replay: Replayer, checkpoints: Path) -> None:
    with pytest.raises(EngineError, match=r"shards=4096 needs 4096 .* this worker has") as error:
        replay.score(make_rollouts(2), checkpoints / "first", "torch.float32", shards=4096)
    assert error.value.kind == "retry"


def test_a_killed_process_fails_the_command_and_the_next_one_starts_others(replay: Replayer, checkpoints: Path) -> None:
    rollouts = make_rollouts(3)
    before, _ = replay.score(rollouts, checkpoints / "first", "torch.float32", shards=2)
    engine = psutil.Process(replay.process_ids()["torch"])
    processes = [each for each in engine.children() if any("rank_processes" in word for word in each.cmdline())]
    assert len(processes) == 2
    processes[1].kill()
    with pytest.raises(EngineError, match="rank 1 of 2 was ended by signal 9") as error:
        replay.score(rollouts, checkpoints / "first", "torch.float32", shards=2)
    assert error.value.kind == "retry"
    assert not psutil.wait_procs(processes, timeout=60)[1]
    again, _ = replay.score(rollouts, checkpoints / "first", "torch.float32", shards=2)
    np.testing.assert_array_equal(again, before)
