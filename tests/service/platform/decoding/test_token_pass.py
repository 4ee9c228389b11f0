"""Decoders compile the pass over tokens before the service is ready, and fall back to numpy."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient

from foreshock.measures.comparison import compare
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.passes import compiled
from foreshock.rollouts import encode_rollouts
from foreshock_service.app import create_app
from foreshock_service.platform.decoding import token_pass
from foreshock_service.platform.decoding.compiling import Compiler
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.decoding.processes import DecoderProcesses
from foreshock_service.platform.decoding.token_pass import (
    COMPILED,
    TokenPassChoice,
    chosen_token_pass,
    first_choice,
    prepare_token_pass,
)
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.local import LocalFile
from foreshock_service.runs.rollouts.shards import PRELOAD, measure_stored
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
    assert "[fast]" in token_pass.token_pass()


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


def wait_until_compiled(pool: DecoderPool) -> None:
    deadline = time.monotonic() + 300
    while pool.token_pass != COMPILED:
        assert time.monotonic() < deadline, pool.token_pass
        time.sleep(0.05)


@pytest.mark.slow
def test_a_decoder_measures_with_the_compiled_pass_within_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The reference is numpy's, even if other tests prepared the compiled pass here.
    monkeypatch.setattr(compiled, "_prepared", False)
    pool = DecoderPool(Settings(decode_processes=1, decode_memory_bytes=512 << 20), PRELOAD)
    try:
        pool.warm_up_in_background()
        wait_until_compiled(pool)
        batch = make_batch(200, seed=3)
        assert batch.trainer_log_probs is not None
        assert batch.rollout_log_probs is not None
        stored = LocalFile("shard.parquet", tmp_path / "shard.parquet")
        stored.path.write_bytes(encode_rollouts(batch))
        parts = {part.comparison: part for part in pool.run(measure_stored, stored).parts}
        found = ComparisonStatistics.from_bytes(bytes(parts["trainer/rollout"].statistics))
        wanted = compare(batch, batch.trainer_log_probs, batch.rollout_log_probs).statistics
        assert found.counts.tolist() == wanted.counts.tolist()
        assert found.histogram.tolist() == wanted.histogram.tolist()
        np.testing.assert_allclose(found.sums.value, wanted.sums.value, rtol=1e-9, atol=1e-12)
    finally:
        pool.close()


def test_first_start_uses_numpy_and_later_ones_load_what_was_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = TokenPassChoice(True, tmp_path)
    assert first_choice(choice) == TokenPassChoice(True, tmp_path, for_now=True)
    prepare_token_pass(first_choice(choice))
    assert token_pass.token_pass().startswith("numpy for now: the first start of a release compiles")
    monkeypatch.setattr(compiled, "prepare", lambda threads: None)
    prepare_token_pass(choice)
    assert first_choice(choice) == choice
    # Other libraries have other machine code.
    monkeypatch.setattr(token_pass, "version", lambda name: "9.9")
    assert first_choice(choice).for_now


def test_decoders_take_tasks_while_the_pass_is_compiled_and_use_it_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, done = threading.Event(), threading.Event()

    def compile_when_told(self: Compiler, choice: TokenPassChoice) -> str:
        compiling.set()
        done.wait(60)
        return "compiled"

    monkeypatch.setattr(Compiler, "compile", compile_when_told)
    monkeypatch.setattr(DecoderProcesses, "renew", lambda self, choice: renewed.append(choice))
    renewed: list[TokenPassChoice] = []
    pool = DecoderPool(Settings(decode_processes=1, compiled_folder=str(tmp_path)), PRELOAD)
    try:
        pool.warm_up_in_background()
        assert compiling.wait(120)
        assert pool.is_warm
        assert pool.run(token_pass.token_pass) == pool.token_pass == token_pass.FOR_NOW
        done.set()
        wait_until_compiled(pool)
        assert renewed == [TokenPassChoice(True, tmp_path)] * 2
    finally:
        done.set()
        pool.close()


def test_renewed_decoders_run_with_the_new_choice_and_busy_ones_finish_first() -> None:
    processes = DecoderProcesses(2, Settings(), TokenPassChoice(True, None, for_now=True), ())
    try:
        assert processes.warm_up() == [token_pass.FOR_NOW] * 2
        busy = threading.Thread(target=processes.run, args=(partial(time.sleep, 1.5),))
        busy.start()
        time.sleep(0.3)
        processes.renew(TokenPassChoice(False, None))
        assert processes.run(token_pass.token_pass) == "numpy, as set by FORESHOCK_TOKEN_PASS"
        busy.join()
        assert {processes.run(token_pass.token_pass) for _ in range(2)} == {"numpy, as set by FORESHOCK_TOKEN_PASS"}
    finally:
        processes.close()


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
