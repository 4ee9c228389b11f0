"""Models that transformers divides: by `device_map` in one process, by `tp_plan` among processes of torchrun."""

from pathlib import Path

import numpy as np
import pytest

from foreshock_probes.engines.process import EngineError
from foreshock_probes.scorers.devices import device_count
from foreshock_probes.scorers.request import UnsupportedScoreError
from tests.probes.replaying import Asked, scored
from tests.probes.scorers.test_torch_forward import score
from tests.probes.tiny import make_rollouts, save_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.skipif(device_count() < 2, reason="needs two devices")
def test_log_probs_of_two_processes_are_those_of_the_whole_model(tmp_path: Path) -> None:
    weights = save_checkpoint(tmp_path / "weights", seed=1, num_key_value_heads=2)
    rollouts = make_rollouts(9)
    asked = [
        Asked(rollouts, weights, "torch.float32", options={"tp_size": 2, **options})
        for options in ({}, {"logits_bytes": 512})
    ]
    (whole, made_by), (in_pieces, _) = scored(tmp_path, *asked)
    plain = score(weights, rollouts, "torch.float32").log_probs
    np.testing.assert_allclose(whole, plain, atol=1e-4)
    np.testing.assert_allclose(in_pieces, plain, atol=1e-4)
    assert made_by.flags["tp_size"] == "2"


def test_device_map_is_given_to_transformers(checkpoints: Path) -> None:
    rollouts = make_rollouts(9)
    plain = score(checkpoints / "first", rollouts, "torch.float32").log_probs
    for logits_bytes in (1 << 20, 512):
        placed = score(checkpoints / "first", rollouts, "torch.float32", device_map="auto", logits_bytes=logits_bytes)
        np.testing.assert_allclose(placed.log_probs, plain, atol=1e-5)
        assert placed.fingerprint.flags["device_map"] == "auto"


def test_too_few_devices_are_a_reason_for_another_worker(checkpoints: Path, tmp_path: Path) -> None:
    asked = Asked(make_rollouts(2), checkpoints / "first", "torch.float32", options={"tp_size": 4096})
    with pytest.raises(EngineError, match=r"tp_size=4096 needs 4096 .* this worker has") as caught:
        scored(tmp_path, asked)
    assert caught.value.kind == "retry"


def test_divisions_that_do_not_go_together_are_refused(checkpoints: Path) -> None:
    with pytest.raises(UnsupportedScoreError, match="tp_size cannot be combined"):
        score(checkpoints / "first", make_rollouts(2), "torch.trainer", tp_size=2, device_map="auto")
    with pytest.raises(UnsupportedScoreError, match="tp_size cannot be combined"):
        score(checkpoints / "first", make_rollouts(2), "torch.trainer", tp_size=2, head_dtype="float32")
