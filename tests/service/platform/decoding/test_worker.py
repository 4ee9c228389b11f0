"""Decoders compile the pass over tokens before the service is ready, and fall back to numpy."""

import sys
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient

from foreshock.measures.comparison import compare
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.passes import compiled
from foreshock.rollouts import encode_rollouts
from foreshock_service.app import create_app
from foreshock_service.platform.decoding import worker
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.tokens import LocalFile
from foreshock_service.runs.shard_decoding import PRELOAD, measure_stored
from tests.service.platform.decoding.running import running_decoders
from tests.service.sending import make_batch
from tests.waiting import wait_until


def test_without_numba_numpy_is_used_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    found = worker.prepare_token_pass(worker.COMPILED)
    assert found.startswith("numpy, several times slower: numba is not installed")
    assert "[fast]" in found


def test_numba_that_rejects_this_numpy_falls_back_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ImportError("Numba needs NumPy 2.3 or less")

    monkeypatch.setattr(compiled, "prepare", refuse)
    assert (
        worker.prepare_token_pass(worker.COMPILED)
        == "numpy, several times slower: ImportError: Numba needs NumPy 2.3 or less"
    )


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_readyz_reports_starting_decoders_until_they_are_ready(settings: Settings) -> None:
    pool = DecoderPool(settings.model_copy(update={"decode_processes": 1, "token_pass": "numpy"}), PRELOAD)
    slow = DecoderPool(settings.model_copy(update={"decode_processes": 1}), PRELOAD)
    try:
        # Without the application's lifespan, the decoders have not been started yet.
        waiting = TestClient(create_app(settings, slow), base_url="http://127.0.0.1").get("/readyz")
        assert waiting.status_code == 503
        assert waiting.json()["checks"]["decoders"] == "starting"
        client = TestClient(create_app(settings, pool), base_url="http://127.0.0.1")
        assert client.get("/readyz").json()["checks"]["decoders"] == "starting"
        pool.warm_up()
        ready = client.get("/readyz")
        assert ready.status_code == 200
        assert ready.json()["checks"]["decoders"] == "ok"
        assert ready.json()["details"] == {"token_pass": "numpy, as set by FORESHOCK_TOKEN_PASS"}
    finally:
        pool.close()
        slow.close()


@pytest.mark.slow
@pytest.mark.full
def test_decoders_compile_before_a_task_and_measure_in_its_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is empty, and compiling takes longer than a task may."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    # The reference is numpy's, even if other tests prepared the compiled pass here.
    monkeypatch.setattr(compiled, "_add_rollouts", None)
    batch = make_batch(200, seed=3)
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    stored = LocalFile("shard.parquet", tmp_path / "shard.parquet")
    stored.path.write_bytes(encode_rollouts(batch))
    pool = DecoderPool(
        Settings(decode_processes=2, decode_memory_bytes=512 << 20, decode_timeout_seconds=10.0), PRELOAD
    )
    try:
        pool.warm_up()
        parts = {part.comparison: part for part in pool.run(measure_stored, stored).parts}
        assert pool.token_pass == worker.COMPILED
        assert list((tmp_path / "cache").rglob("*.nbi"))
    finally:
        pool.close()
    found = ComparisonStatistics.from_bytes(bytes(parts["trainer/rollout"].statistics))
    wanted = compare(batch, batch.trainer_log_probs, batch.rollout_log_probs).statistics
    assert found.counts.tolist() == wanted.counts.tolist()
    assert found.histogram.tolist() == wanted.histogram.tolist()
    np.testing.assert_allclose(found.sums, wanted.sums, rtol=1e-9, atol=1e-12)


def test_stop_does_not_wait_for_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    before = running_decoders()
    pool = DecoderPool(Settings(decode_processes=2), PRELOAD)
    pool.warm_up_in_background()
    wait_until(lambda: running_decoders() - before, 300)
    pool.close()
    assert pool.state != "ok"
    assert not running_decoders() - before
