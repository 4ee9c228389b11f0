"""A replay of a LoRA run loads the adapter as the engine that sampled did, and does not merge it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from foreshock.digests import weights_digest
from foreshock.fingerprint import MERGED_ADAPTER
from foreshock.scorers import SCORERS
from foreshock_probes.adapters import base_folder_of, is_loaded_by, merged_model, modules_of, rank_of
from foreshock_probes.engines.process import EngineError, run_tasks
from foreshock_probes.scorers.forward_pass import load_model
from tests.probes.adapted import TARGETS, replayed, save_adapter
from tests.probes.replaying import Asked, scores_of_task
from tests.probes.tiny import make_rollouts, save_checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("lora") / "base", seed=1)


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return save_adapter(base.parent / "adapter", base)


def test_adapter_names_its_base_its_modules_and_its_rank(base: Path, adapter: Path) -> None:
    assert base_folder_of(adapter) == base.resolve()
    assert modules_of(adapter) == sorted(TARGETS)
    assert rank_of(adapter) == 8


def test_engines_load_the_adapters_that_they_can_and_others_are_merged(adapter: Path, tmp_path: Path) -> None:
    others = []
    for name in ("lm_head", "model.layers.0.mlp.experts.1.up_proj"):
        other = tmp_path / name
        other.mkdir()
        tensors = {f"base_model.model.{name}.lora_{half}.weight": torch.zeros(8, 8) for half in "AB"}
        save_file(tensors, other / "adapter_model.safetensors")
        others.append(other)
    able = {
        name: [is_loaded_by(name, each) for each in (adapter, *others)]
        for name, row in SCORERS.items()
        if row.implementation is not None
    }
    assert able["vllm.prefill"] == able["vllm.decode"] == able["vllm.http"] == [True, False, False]
    assert able["torch.trainer"] == able["torch.bfloat16"] == [True, True, True]
    assert able["torch.own"] == able["sglang.http"] == [False, False, False]


def test_model_with_the_adapter_computes_what_the_merged_one_does(base: Path, adapter: Path) -> None:
    ids = torch.arange(20)[None]
    with torch.no_grad():
        merged = merged_model(adapter, base)(ids).logits
        cpu = torch.device("cpu")
        loaded = load_model(base, torch.float32, "sdpa", cpu, adapter=adapter)
        plain = load_model(base, torch.float32, "sdpa", cpu)
        torch.testing.assert_close(loaded(ids).logits, merged, rtol=1e-4, atol=1e-4)
        assert (plain(ids).logits - merged).abs().max() > 1e-3
        half = load_model(base, torch.bfloat16, "sdpa", cpu, adapter=adapter)
    assert {value.dtype for value in half.parameters()} == {torch.bfloat16}


def test_adapter_that_peft_cannot_load_fails_the_task_with_the_reason(base: Path, tmp_path: Path) -> None:
    broken = save_adapter(tmp_path / "adapter", base)
    configuration = broken / "adapter_config.json"
    configuration.write_text(configuration.read_text("utf-8").replace('"use_dora": false', '"use_dora": true'))
    task = Asked(make_rollouts(2), base, "torch.float32").task(tmp_path, "0", adapter=str(broken))
    with pytest.raises(EngineError, match=r"describe other tensors, such as .*lora_magnitude_vector") as caught:
        run_tasks([task], scores_of_task, tmp_path)
    assert caught.value.kind == "final"


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_replay_in_bfloat16_equals_what_vllm_served(base: Path, adapter: Path, tmp_path: Path) -> None:
    found = replayed(base, adapter, tmp_path)
    assert found.k3(found.prefill) <= found.rounding
    assert found.k3(found.decode) <= found.rounding
    assert found.k3(found.merged) > 1e-5
    assert found.k3(found.by_torch) < found.k3(found.merged_by_torch)
    for _, fingerprint in (found.prefill, found.decode, found.by_torch):
        assert fingerprint.flags["adapter"] == "loaded by the engine"
        assert fingerprint.weights_digest == weights_digest(adapter)


def test_score_of_a_merged_model_says_so(base: Path, tmp_path: Path) -> None:
    task = Asked(make_rollouts(3), base, "torch.float32").task(tmp_path, "0", merged_adapter=True)
    ((_, fingerprint),) = run_tasks([task], scores_of_task, tmp_path).results
    assert fingerprint.flags["adapter"] == MERGED_ADAPTER
