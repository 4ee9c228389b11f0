"""The worker, the service and real engines compare a pair and publish it; a killed worker changes nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from foreshock.digests import weights_digest
from foreshock.scorers import EXACT_PAIRS
from tests.probes.conftest import RunningService
from tests.probes.test_worker import ProbedRun, run_worker, start_run, worker_process
from tests.probes.tiny import make_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

(PAIR,) = EXACT_PAIRS.values()
SCORERS = (PAIR.target, PAIR.behaviour)
IN_FLOAT32 = {PAIR.target: {"autocast": None, "master_dtype": "float32"}, PAIR.behaviour: {"dtype": "float32"}}


@pytest.fixture
def run(service: RunningService, checkpoints: Path) -> Iterator[ProbedRun]:
    started = start_run(service, make_rollouts(12))
    started.announce(weights_digest(checkpoints / "first"))
    yield started
    service.http.delete(f"/v1/runs/{started.run}")


def test_pair_of_a_killed_worker_is_compared_by_another(run: ProbedRun, checkpoints: Path, tmp_path: Path) -> None:
    probe = run.probe(exact_pairs=[PAIR.key], options=IN_FLOAT32, environment="any")
    with worker_process(run.service, checkpoints, tmp_path, SCORERS) as (process, _):
        run.wait_for(probe, {"running"})
        process.kill()
        process.wait()
    assert run.service.http.get(f"/v1/runs/{run.run}/steps/1/exact").status_code == 404
    log = run_worker(run.service, checkpoints, scorers=SCORERS, worker_name="the-second")
    (job,) = run.read(probe)["jobs"]
    assert (job["state"], job["worker"], job["attempts"]) == ("done", "the-second", 2), log
    assert "lease expired" in job["reasons"][0]
    assert f"{PAIR.name}: " in log
    (exact,), rollouts = run.get("steps/1/exact")["items"], make_rollouts(12)
    assert (exact["tokens"], exact["non_finite"]) == (rollouts.num_tokens, 0)
    # The same weights in float32 on both sides.
    assert 0.0 <= exact["kl"]["mean"] < 1e-10
    assert exact["behaviour_entropy"]["mean"] == pytest.approx(exact["target_entropy"]["mean"], rel=1e-4)
    for side, engine in (("target", "torch"), ("behaviour", "vllm")):
        fingerprint = exact[f"{side}_fingerprint"]
        assert (fingerprint["engine"], fingerprint["dtype"]) == (engine, "float32")
        assert fingerprint["weights_digest"] == weights_digest(checkpoints / "first")
        assert fingerprint["cpu_isa"]
