"""A worker does a weights search of the real service, in a real engine, and the service says what the engine held."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from foreshock.digests import weights_digest
from foreshock_probes.engines.process import EnginePool
from foreshock_probes.weights_search.assembly import assemble, read_ingredients
from tests.probes.conftest import RunningService
from tests.probes.replaying import Replayer
from tests.probes.test_worker import ProbedRun, run_worker, start_run
from tests.probes.tiny import make_rollouts

pytestmark = pytest.mark.slow


def announce(run: ProbedRun, step: int, path: str, digest: str) -> None:
    """Announce the weights of a step."""
    body = {"root": "runs", "path": path, "digest": digest}
    address = f"/v1/runs/{run.run}/checkpoints/{step}"
    run.service.http.put(address, params={"attempt": 1}, json=body).raise_for_status()


@pytest.mark.parametrize("with_true_weights", [True, False])
def test_stale_head_is_found_unless_its_weights_are_gone(
    with_true_weights: bool,
    service: RunningService,
    checkpoints: Path,
    engines: EnginePool,
    replay: Replayer,
    tmp_path: Path,
) -> None:
    for name in ("first", "second"):
        shutil.copytree(checkpoints / name, tmp_path / name)
    digests = {name: weights_digest(tmp_path / name) for name in ("first", "second")}
    first, second = read_ingredients(tmp_path / "first"), read_ingredients(tmp_path / "second")
    assemble(first, second, ("lm_head",), held := tmp_path / "held")
    rollouts = make_rollouts(12)
    log_probs, _ = replay.score(rollouts, held, "torch.float32")
    sampled = make_rollouts(12, rollout_log_probs=np.split(log_probs, rollouts.response_offsets[1:-1]))
    run = start_run(service, sampled)
    announce(run, 1, "first", digests["first"])
    announce(run, 0, "second", digests["second"])
    if not with_true_weights:
        shutil.rmtree(tmp_path / "second")
    body = {"step": 1, "kind": "weights", "scorers": [{"scorer": "torch.float32"}]}
    probe = service.http.post(f"/v1/runs/{run.run}/probes", json=body).raise_for_status().json()["id"]
    output = run_worker(service, tmp_path, engines)
    assert run.read(probe)["state"] == "done", output
    found = service.http.get(f"/v1/runs/{run.run}/steps/1/weights-search").raise_for_status().json()
    replays = {(each["step"], each["part"]): each for each in found["replays"]}
    assert replays[1, "all"]["k3_kl"] > 1e-3
    if with_true_weights:
        assert replays[0, "lm_head"]["k3_kl"] < 1e-12
        assert replays[0, "lm_head"]["at_noise_floor"]
        assert found["confirmed_k3"] == replays[0, "lm_head"]["k3_kl"]
        assert "the lm_head of step 0: k3 " in output
    else:
        assert "moved or deleted" in replays[0, "all"]["skipped"]
        assert found["ended"] == "no other weights could be replayed"
    service.http.delete(f"/v1/runs/{run.run}")
