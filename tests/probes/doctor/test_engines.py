"""Real engines are asked by the doctor, and what they refuse is reported in their words after one try."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foreshock.doctor import Budget, examine
from foreshock_probes.doctor.engines import EngineReplays
from foreshock_probes.doctor.experimenter import TorchExperimenter
from tests.probes.replaying import questions_of
from tests.probes.scorers.test_torch_forward import score
from tests.probes.tiny import make_rollouts

pytestmark = pytest.mark.slow


def test_options_that_vllm_refuses_are_reported_in_its_words_after_one_try(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that nothing explains, so that all engines are asked."""
    rollouts = make_rollouts(24)
    folder = checkpoints / "first"
    log_probs = score(folder, rollouts, "torch.float32").log_probs
    noise = np.random.default_rng(0).normal(0, 0.3, log_probs.size).astype(np.float32)
    batch = replace(rollouts, rollout_log_probs=np.minimum(log_probs + noise, 0))
    made = questions_of(monkeypatch)
    asked = ("vllm.prefill", "vllm.prefill:kv_cache_dtype=fp8", "vllm.prefill:speculation=1", "sglang.http")
    of_engines = EngineReplays(batch, folder, tmp_path)
    experimenter = TorchExperimenter.of_folders(batch, folder, folder, [], 1, of_engines, asked)
    report = examine(batch, experimenter, Budget(seconds=math.inf, most_replays=8))
    assert report.causes == ()
    why = {each.variant: each.why for each in report.not_tried}
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        assert "FP8 KV cache on CPU requires" in why["engine_option: vllm.prefill:kv_cache_dtype=fp8 [rollout]"]
    assert "speculation" in why["engine_option: vllm.prefill:speculation=1 [rollout]"]
    assert "FORESHOCK_ENGINE_SERVERS" in why["the engine sglang.http"]
    assert sorted(made) == sorted(asked)
    assert np.abs(of_engines.log_probs("vllm.prefill") - log_probs).mean() < 0.1
