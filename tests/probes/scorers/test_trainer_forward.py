"""`torch.own` calls the function of the worker's configuration in any order, and checks its answer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from foreshock.digests import weights_digest
from foreshock.rollouts import RolloutBatch
from foreshock_probes.offers import installed_scorers, what_lacks
from foreshock_probes.scorers import torch_forward, trainer_forward
from foreshock_probes.scorers.request import Scored, ScoreRequest, UnsupportedScoreError, WarmModel
from tests.probes.tiny import make_rollouts, save_checkpoint

NAME = "torch.own"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("weights") / "step", seed=1)


def scored(checkpoint: Path, scorer: str, variant: str = "", **options: object) -> Scored:
    """Score the rollouts of these tests."""
    request = ScoreRequest(
        scorer, variant, make_rollouts(6, seed=2), checkpoint, weights_digest(checkpoint), None, options
    )
    score = trainer_forward.score if scorer == NAME else torch_forward.score
    return score(request, WarmModel(), lambda _: None)


def load_half(folder: Path) -> object:
    """Return a forward pass of which every log-prob is minus the token's id."""
    return lambda batch: -batch.response_token_ids.astype(np.float64)


def load_wrong(folder: Path) -> object:
    """Return a forward pass that gives a value for each rollout."""
    return lambda batch: np.zeros(batch.num_rollouts)


def test_it_is_offered_only_where_a_function_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORESHOCK_TRAINER_FORWARD", raising=False)
    assert NAME not in installed_scorers()
    assert "FORESHOCK_TRAINER_FORWARD" in str(what_lacks(NAME))
    monkeypatch.setenv("FORESHOCK_TRAINER_FORWARD", f"{__name__}:load_half")
    assert NAME in installed_scorers()


def test_each_token_gets_its_own_log_prob_in_either_order(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_TRAINER_FORWARD", f"{__name__}:load_half")
    rollouts: RolloutBatch = make_rollouts(6, seed=2)
    for variant in ("", "rebatched"):
        found = scored(checkpoint, NAME, variant)
        np.testing.assert_array_equal(found.log_probs, -rollouts.response_token_ids.astype(np.float32))
    assert found.fingerprint.flags["forward"] == f"{__name__}:load_half"


def test_wrong_answers_and_options_are_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_TRAINER_FORWARD", f"{__name__}:load_wrong")
    with pytest.raises(UnsupportedScoreError, match="one for each response token, got shape"):
        scored(checkpoint, NAME)
    with pytest.raises(UnsupportedScoreError, match="batch_size"):
        scored(checkpoint, NAME, batch_size=4)


# FSDP2's parameters are gathered in bfloat16, and nothing is computed in float32 as autocast does.
PRECISIONS: dict[str, dict[str, Any]] = {
    "load_fsdp2": {"master_dtype": "bfloat16", "autocast": None},
    "load_verl": {"master_dtype": "bfloat16", "autocast": None},
    "load_trl": {"master_dtype": "float32", "autocast": "bfloat16"},
}


# verl warns of each of its engines that is not installed.
@pytest.mark.parametrize(
    "example", [pytest.param(each, marks=pytest.mark.filterwarnings("ignore")) for each in PRECISIONS]
)
def test_examples_agree_with_torch_trainer(checkpoint: Path, example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if example == "load_verl":
        # verl knows no CPU, and patches TRL where there is one, which has no longer what it patches.
        cpu = SimpleNamespace(device_name="cpu", device_module=torch.cpu, current_device=lambda: torch.device("cpu"))
        monkeypatch.setattr("verl.utils.device.get_platform", lambda: cpu)
        monkeypatch.setattr("verl.models.transformers.monkey_patch.is_trl_available", lambda: False)
    monkeypatch.setenv("FORESHOCK_TRAINER_FORWARD", f"examples.trainer_forward:{example}")
    found, replay = scored(checkpoint, NAME), scored(checkpoint, "torch.trainer", **PRECISIONS[example])
    difference = np.abs(found.log_probs - replay.log_probs)
    assert difference.max() < 0.1
    assert difference.mean() < 0.01
    assert found.fingerprint.master_dtype == "float32"
