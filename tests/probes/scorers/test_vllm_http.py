"""`vllm.http` on a real vLLM server: its log-probs are the model's, and a server with other weights is refused."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from foreshock.digests import weights_digest
from foreshock.rollouts import BatchAttributes, RolloutBatch
from foreshock_probes.adapters import modules_of
from foreshock_probes.engines.process import EngineError
from foreshock_probes.offers import load_scorer
from foreshock_probes.scorers.request import ScoreRequest, UnsupportedScoreError, WarmModel
from tests.ports import free_port
from tests.probes.adapted import save_adapter
from tests.probes.replaying import Asked, scored
from tests.probes.scorers.test_torch_forward import score
from tests.probes.tiny import VOCABULARY, make_rollouts, save_checkpoint
from tests.waiting import wait_until_answered

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

KEY = "a key of the server"


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of one word per id: vLLM's completions need one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A checkpoint, and the address of a vLLM server that was started on it."""
    root = tmp_path_factory.mktemp("served")
    weights = save_checkpoint(root / "weights", seed=1)
    save_tokenizer(weights)
    adapter = save_adapter(root / "adapter", weights)
    port = free_port()
    variables = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    # The worker runs in the process of the engine core: one import of vLLM less.
    variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--enforce-eager", "--no-enable-prefix-caching", "--dtype", "float32"]
    command += ["--max-model-len", "64", "--served-model-name", "policy", "--api-key", KEY]
    command += ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"adapter={adapter}"]
    command += ["--lora-target-modules", *modules_of(adapter)]
    log = root / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=variables)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until_answered(f"{address}/health", lambda: process.poll() is None, log, 600)
        yield weights, address
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def configured(served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint of the server that the worker's settings name."""
    weights, address = served
    monkeypatch.setenv("FORESHOCK_ENGINE_SERVERS", f"vllm={address}")
    monkeypatch.setenv("FORESHOCK_ENGINE_SERVER_KEYS", f"vllm={KEY}")
    return weights


def test_log_probs_of_the_server_are_the_models(configured: Path) -> None:
    rollouts = make_rollouts(17)
    by_server = score(configured, rollouts, "vllm.http", batch_size=5)
    by_torch = score(configured, rollouts, "torch.float32").log_probs
    np.testing.assert_allclose(by_server.log_probs, by_torch, atol=1e-4)
    made_by = by_server.fingerprint
    assert (made_by.engine, made_by.flags["model"], made_by.flags["weights_seen_by"]) == ("vllm", "policy", "folder")
    assert made_by.engine_version
    assert made_by.device_name is None


def test_adapter_of_the_server_is_scored_and_another_is_refused(configured: Path, tmp_path: Path) -> None:
    rollouts, adapter = make_rollouts(9), configured.parent / "adapter"
    by_server, by_torch, plain = (
        load_scorer(name)(
            ScoreRequest(name, "", rollouts, configured, weights_digest(adapter), adapter=loaded), WarmModel(), print
        )
        for name, loaded in (("vllm.http", adapter), ("torch.float32", adapter), ("torch.float32", None))
    )
    np.testing.assert_allclose(by_server.log_probs, by_torch.log_probs, atol=1e-4)
    assert np.abs(by_server.log_probs - plain.log_probs).max() > 1e-2
    assert by_server.fingerprint.flags["model"] == "adapter"
    other = save_adapter(tmp_path / "other", configured)
    request = ScoreRequest("vllm.http", "", rollouts, configured, weights_digest(other), adapter=other)
    with pytest.raises(UnsupportedScoreError, match=r"serves no LoRA adapter of the folder .*--lora-target-modules"):
        load_scorer("vllm.http")(request, WarmModel(), print)


def test_empty_prompts_and_responses_are_scored(configured: Path) -> None:
    rollouts = RolloutBatch.from_lists(["a", "b", "c", "d"], [[], [3], [4], []], [[5, 6], [], [7], [8]])
    by_server = score(configured, rollouts, "vllm.http").log_probs
    assert np.isnan(by_server).tolist() == [True, False, False, True]
    np.testing.assert_allclose(by_server, score(configured, rollouts).log_probs, atol=1e-4)


def test_engine_process_reads_the_server_from_the_workers_settings(configured: Path, tmp_path: Path) -> None:
    rollouts = make_rollouts(5)
    ((by_server, _),) = scored(tmp_path, Asked(rollouts, configured, "vllm.http"))
    np.testing.assert_allclose(by_server, score(configured, rollouts).log_probs, atol=1e-4)


def test_server_with_other_weights_is_refused(configured: Path, checkpoints: Path) -> None:
    with pytest.raises(UnsupportedScoreError, match="cannot be seen to hold the checkpoint"):
        score(checkpoints / "second", make_rollouts(2), "vllm.http")


def test_what_a_server_cannot_score_is_refused(configured: Path) -> None:
    processed = BatchAttributes(logprobs_mode="processed_logprobs", temperature=0.5)
    with pytest.raises(UnsupportedScoreError, match="raw ones"):
        score(configured, make_rollouts(2, attributes=processed), "vllm.http")
    with pytest.raises(UnsupportedScoreError, match="maximum model length"):
        score(configured, RolloutBatch.from_lists(["a"], [[1] * 40], [[2] * 30]), "vllm.http")


def test_wrong_key_names_the_setting(configured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_ENGINE_SERVER_KEYS", "vllm=another")
    with pytest.raises(UnsupportedScoreError, match="FORESHOCK_ENGINE_SERVER_KEYS='vllm="):
        score(configured, make_rollouts(2), "vllm.http")


def test_server_that_is_down_is_asked_again(configured: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORESHOCK_ENGINE_SERVERS", "vllm=http://127.0.0.1:9")
    with pytest.raises(EngineError, match="correct FORESHOCK_ENGINE_SERVERS") as raised:
        scored(tmp_path, Asked(make_rollouts(2), configured, "vllm.http"))
    assert raised.value.kind == "retry"
