"""Decoders compile the pass over tokens before the service is ready, and fall back to numpy."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient

from foreshock.measures.comparison import compare
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.passes import compiled
from foreshock.rollouts import encode_rollouts
from service.app import create_app
from service.platform.decoding import token_pass
from service.platform.decoding.pool import DecoderPool
from service.platform.decoding.token_pass import COMPILED, TokenPassChoice, chosen_token_pass, prepare_token_pass
from service.platform.settings import Settings
from service.platform.store.local import LocalFile
from service.runs.rollouts.shards import PRELOAD, measure_stored
from tests.service.sending import make_batch


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the environment that a decoder changes for its own process."""
    monkeypatch.setattr(token_pass, "_found", "")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")


def test_compiled_code_is_kept_in_the_configured_folder(tmp_path: Path) -> None:
    choice = chosen_token_pass(Settings(compiled_folder=str(tmp_path / "here")))
    assert choice == TokenPassChoice(True, tmp_path / "here")


def test_default_cache_folder_is_beside_the_package_or_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(store_url=str(tmp_path / "tokens"))
    assert chosen_token_pass(settings).folder is None
    # As in a container whose packages belong to another user.
    monkeypatch.setattr(token_pass, "package_folder", lambda: tmp_path / "not-there")
    assert chosen_token_pass(settings).folder == tmp_path / "compiled"


def test_numba_cache_folder_is_writable_only_by_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(compiled, "prepare", lambda threads: calls.append((os.environ["NUMBA_CACHE_DIR"], threads)))
    folder = tmp_path / "data" / "compiled"
    prepare_token_pass(TokenPassChoice(True, folder))
    assert token_pass.token_pass() == COMPILED
    assert calls == [(str(folder), 1)]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_without_numba_numpy_is_used_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    prepare_token_pass(TokenPassChoice(True, None))
    assert token_pass.token_pass().startswith("numpy, several times slower: numba is not installed")
    assert "foreshock[fast]" in token_pass.token_pass()


def test_numba_that_rejects_this_numpy_falls_back_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(threads: int) -> None:
        raise ImportError("Numba needs NumPy 2.3 or less")

    monkeypatch.setattr(compiled, "prepare", refuse)
    prepare_token_pass(TokenPassChoice(True, None))
    assert token_pass.token_pass() == ("numpy, several times slower: ImportError: Numba needs NumPy 2.3 or less")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_readyz_reports_starting_decoders_until_they_are_ready(settings: Settings) -> None:
    pool = DecoderPool(settings.model_copy(update={"decode_processes": 1, "token_pass": "numpy"}), PRELOAD)
    slow = DecoderPool(settings.model_copy(update={"decode_processes": 1}), PRELOAD)
    try:
        # Without the application's lifespan, the decoders have not been started yet.
        waiting = TestClient(create_app(settings, slow), base_url="http://127.0.0.1").get("/readyz")
        assert waiting.status_code == 503
        assert "compiles the pass over tokens" in waiting.json()["checks"]["decoders"]
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
def test_a_decoder_measures_with_the_compiled_pass_within_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The reference is numpy's, even if other tests prepared the compiled pass here.
    monkeypatch.setattr(compiled, "_prepared", False)
    pool = DecoderPool(Settings(decode_processes=1, decode_memory_bytes=512 << 20), PRELOAD)
    try:
        pool.warm_up()
        assert pool.token_pass == COMPILED
        batch = make_batch(200, seed=3)
        assert batch.trainer_log_probs is not None
        assert batch.rollout_log_probs is not None
        stored = LocalFile("shard.parquet", tmp_path / "shard.parquet")
        stored.path.write_bytes(encode_rollouts(batch))
        parts = {part.comparison: part for part in pool.run(measure_stored, stored).parts}
        found = ComparisonStatistics.from_bytes(parts["trainer/rollout"].statistics)
        wanted = compare(batch, batch.trainer_log_probs, batch.rollout_log_probs).statistics
        assert found.counts.tolist() == wanted.counts.tolist()
        assert found.histogram.tolist() == wanted.histogram.tolist()
        np.testing.assert_allclose(found.sums.value, wanted.sums.value, rtol=1e-9, atol=1e-12)
    finally:
        pool.close()


@pytest.mark.parametrize("started", [False, True])
def test_stop_before_ready_does_not_wait_for_compilation(tmp_path: Path, started: bool) -> None:
    others = set(multiprocessing.active_children())
    # A folder without compiled code: becoming ready would take a minute.
    pool = DecoderPool(Settings(decode_processes=1, compiled_folder=str(tmp_path)), PRELOAD)
    pool.warm_up_in_background()
    while started and not set(multiprocessing.active_children()) - others:
        time.sleep(0.01)
    pool.close()
    assert not pool.is_warm
    assert set(multiprocessing.active_children()) <= others
