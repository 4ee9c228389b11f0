"""A worker examines a step of the real service by real replays, and the service says what the engine held."""

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foreshock.commands.main import main
from foreshock.digests import weights_digest
from tests.probes.conftest import RunningService
from tests.probes.scorers.test_torch_forward import score
from tests.probes.test_worker import ProbedRun, run_worker, start_run
from tests.probes.tiny import make_rollouts
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def _asked(run: ProbedRun, command: Future[int]) -> str:
    """Return the probe that a command requests. It ends only when a worker has done it."""
    wait_until(lambda: command.done() or run.get("probes")["items"], 120)
    items = run.get("probes")["items"]
    assert items, f"no examination was requested: {command.result(timeout=1)}"
    return str(items[0]["id"])


def test_run_without_weights_says_what_to_announce(service: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    run = start_run(service, make_rollouts(4))
    assert main(["doctor", run.run, "--url", service.url]) == 1
    assert "has announced no weights, which replays need" in capsys.readouterr().err
    service.http.delete(f"/v1/runs/{run.run}")


@pytest.mark.parametrize("with_true_weights", [True, False])
def test_stale_weights_are_found_unless_they_are_gone(
    with_true_weights: bool,
    service: RunningService,
    checkpoints: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("first", "second"):
        shutil.copytree(checkpoints / name, tmp_path / name)
    rollouts = make_rollouts(24)
    log_probs = score(tmp_path / "second", rollouts, "torch.float32").log_probs
    sampled = make_rollouts(24, rollout_log_probs=np.split(log_probs, rollouts.response_offsets[1:-1]))
    run = start_run(service, sampled)
    for step, path in ((1, "first"), (0, "second")):
        run.announce(weights_digest(tmp_path / path), path, step)
    if not with_true_weights:
        shutil.rmtree(tmp_path / "second")
    address = f"/v1/runs/{run.run}/steps/1/doctor"
    with ThreadPoolExecutor(1) as pool:
        command = pool.submit(main, ["doctor", run.run, "--step", "1", "--budget", "20s", "--url", service.url])
        probe = _asked(run, command)
        output = run_worker(service, tmp_path)
        assert run.read(probe)["state"] == "done", output
        assert command.result(timeout=120) == 0
    printed = capsys.readouterr().out
    assert ("cause: " in printed) == with_true_weights
    report = service.http.get(address).raise_for_status().json()["report"]
    causes = [(each["side"], each["cause"], each["value"]) for each in report["findings"] if each["kind"] == "cause"]
    if with_true_weights:
        assert causes == [("rollout", "other_weights", "step 0")]
    else:
        assert causes == []
        assert "moved or deleted" in next(each["why"] for each in report["not_tried"] if each["variant"] == "step 0")
    service.http.delete(f"/v1/runs/{run.run}")


def test_two_runs_are_compared_by_replays_with_the_weights_of_the_other(
    service: RunningService, checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engines of both runs hold the weights of the second one."""
    rollouts = make_rollouts(24)
    log_probs = score(checkpoints / "second", rollouts, "torch.float32").log_probs
    sampled = make_rollouts(24, rollout_log_probs=np.split(log_probs, rollouts.response_offsets[1:-1]))
    run, other = start_run(service, sampled), start_run(service, sampled)
    for each, path in ((run, "first"), (other, "second")):
        each.announce(weights_digest(checkpoints / path), path)
    title = service.http.get(f"/v1/runs/{other.run}").raise_for_status().json()["key"]
    words = ["doctor", run.run, "--against", other.run, "--budget", "20s", "--url", service.url]
    with ThreadPoolExecutor(1) as pool:
        command = pool.submit(main, words)
        _asked(other, command)
        output = run_worker(service, checkpoints, jobs=2)
        assert command.result(timeout=120) == 0, output
    printed = capsys.readouterr().out
    assert f"are those of the weights step 1 of {title}" in printed[printed.index("what differs between") :]
    assert f"only in {title}" not in printed
    for each in (run, other):
        service.http.delete(f"/v1/runs/{each.run}")


def test_rollouts_of_another_tokenizer_fail_at_once(service: RunningService, checkpoints: Path) -> None:
    plain = make_rollouts(4)
    logged = np.split(np.full(plain.num_tokens, -1.0, np.float32), plain.response_offsets[1:-1])
    batch = make_rollouts(4, rollout_log_probs=logged)
    run = start_run(service, replace(batch, response_token_ids=np.full(batch.num_tokens, 100_000, np.int32)))
    run.announce(weights_digest(checkpoints / "first"))
    probe = run.probe(kind="doctor")
    run_worker(service, checkpoints)
    found = run.read(probe)
    assert (found["state"], found["jobs"][0]["attempts"]) == ("failed", 1)
    assert "they are of another tokenizer" in found["reason"]
    service.http.delete(f"/v1/runs/{run.run}")
