"""Decoders compile the pass over tokens before the service is ready, and fall back to numpy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fastapi.testclient import TestClient

from foreshock.measures.comparison import compare
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.passes import compiled
from foreshock.rollouts import encode_rollouts
from foreshock_service.app import create_app
from foreshock_service.platform.decoding import worker
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.decoding.worker import (
    COMPILED,
    TokenPassChoice,
    chosen_token_pass,
    first_choice,
    prepare_token_pass,
)
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.tokens import LocalFile
from foreshock_service.runs.shard_decoding import PRELOAD, measure_stored
from tests.service.sending import make_batch


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the environment that a decoder changes for its own process."""
    monkeypatch.setattr(worker, "_found", "")
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
    monkeypatch.setattr(worker, "package_folder", lambda: tmp_path / "not-there")
    assert chosen_token_pass(settings).folder == tmp_path / "compiled"


def test_numba_cache_folder_is_writable_only_by_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(compiled, "prepare", lambda: calls.append(os.environ["NUMBA_CACHE_DIR"]))
    folder = tmp_path / "data" / "compiled"
    prepare_token_pass(TokenPassChoice(True, folder))
    assert worker.token_pass() == COMPILED
    assert calls == [str(folder)]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_without_numba_numpy_is_used_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    prepare_token_pass(TokenPassChoice(True, None))
    assert worker.token_pass().startswith("numpy, several times slower: numba is not installed")
    assert "[fast]" in worker.token_pass()


def test_numba_that_rejects_this_numpy_falls_back_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ImportError("Numba needs NumPy 2.3 or less")

    monkeypatch.setattr(compiled, "prepare", refuse)
    prepare_token_pass(TokenPassChoice(True, None))
    assert worker.token_pass() == ("numpy, several times slower: ImportError: Numba needs NumPy 2.3 or less")


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


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_decoder_measures_with_the_compiled_pass_within_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The reference is numpy's, even if other tests prepared the compiled pass here.
    monkeypatch.setattr(compiled, "_add_rollouts", None)
    pool = DecoderPool(Settings(decode_processes=1, decode_memory_bytes=512 << 20), PRELOAD)
    try:
        pool.warm_up_in_background()
        wait_until(lambda: pool.token_pass == COMPILED)
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
    assert worker.token_pass().startswith("numpy for now: the first start of a release compiles")
    monkeypatch.setattr(compiled, "prepare", lambda: None)
    prepare_token_pass(choice)
    assert first_choice(choice) == choice
    # Other libraries have other machine code.
    monkeypatch.setattr(worker, "version", lambda name: "9.9")
    assert first_choice(choice).for_now


def test_decoders_take_tasks_while_the_pass_is_compiled_and_use_it_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler waits for a file, and marks its end as one that has compiled does."""
    done = tmp_path / "done"
    code = f"import pathlib, time\nwhile not pathlib.Path({str(done)!r}).exists(): time.sleep(0.01)"
    popen, commands = subprocess.Popen, []

    def compile_when_told(command: list[str], **options: Any) -> Any:
        commands.append(command[1:])
        return popen([sys.executable, "-c", code], **options)

    settings = Settings(decode_processes=1, compiled_folder=str(tmp_path))
    pool = DecoderPool(settings, PRELOAD)
    monkeypatch.setattr(subprocess, "Popen", compile_when_told)
    monkeypatch.setattr(pool, "_wanted_choice", TokenPassChoice(False, tmp_path))
    try:
        pool.warm_up_in_background()
        wait_until(lambda: pool.is_warm)
        assert pool.run(worker.token_pass) == pool.token_pass == worker.FOR_NOW
        done.touch()
        as_set = "numpy, as set by FORESHOCK_TOKEN_PASS"
        wait_until(lambda: pool.token_pass == as_set)
        assert pool.run(worker.token_pass) == as_set
        assert commands == [["-m", "foreshock.measures.passes.compiling"]]
    finally:
        done.touch()
        pool.close()


def test_stop_does_not_wait_for_compilation(tmp_path: Path) -> None:
    others = set(psutil.Process().children())
    # A folder without compiled code.
    pool = DecoderPool(Settings(decode_processes=1, compiled_folder=str(tmp_path)), PRELOAD)
    pool.warm_up_in_background()
    wait_until(lambda: pool._compiler is not None)
    pool.close()
    assert pool._compiler is not None
    assert pool._compiler.wait(60) == -signal.SIGKILL
    assert not {child for child in set(psutil.Process().children()) - others if "spawn_main" in child.cmdline()}
