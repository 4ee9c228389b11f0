"""The clip range of a framework's settings becomes `clip_low` and `clip_high` of its batches."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foreshock.integrations import clip_range
from foreshock.integrations.verl_columns import attributes_of


def test_verls_default_range_is_that_of_its_configuration() -> None:
    omegaconf, verl = pytest.importorskip("omegaconf"), pytest.importorskip("verl")
    defaults = Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    configuration = omegaconf.OmegaConf.load(defaults)
    configuration.actor_rollout_ref.actor.clip_ratio_high = 0.28
    attributes = attributes_of(configuration)
    assert (attributes.clip_low, attributes.clip_high) == (0.2, 0.28)
    configuration.actor_rollout_ref.actor.policy_loss.loss_mode = "gspo"
    assert attributes_of(configuration).clip_low is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"clip_low": 0.2, "clip_high": 0.2}),
        ({"epsilon": 0.1, "epsilon_high": 0.3, "loss_type": "dapo"}, {"clip_low": 0.1, "clip_high": 0.3}),
        ({"loss_type": "cispo"}, {}),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, {}),
    ],
)
def test_range_of_trl(settings: dict[str, Any], expected: dict[str, float], tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    configured = trl.GRPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to=[], **settings)
    assert clip_range("trl", configured) == expected


def test_rloo_clips_the_ratio_of_sequences(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    configured = trl.RLOOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to=[])
    assert clip_range("trl", configured) == {}


def test_range_of_slime_by_estimator() -> None:
    arguments = SimpleNamespace(eps_clip=0.2, eps_clip_high=None, advantage_estimator="grpo")
    assert clip_range("slime", arguments) == {"clip_low": 0.2, "clip_high": 0.2}
    arguments.advantage_estimator = "gspo"
    assert clip_range("slime", arguments) == {}
