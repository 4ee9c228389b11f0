"""A comparison by layer through the command, the real service, a worker and a real engine process."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from foreshock import Reader
from foreshock.commands.main import main
from foreshock.digests import weights_digest
from tests.probes.conftest import RunningService
from tests.probes.test_worker import ProbedRun, run_worker, start_run
from tests.probes.tiny import make_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROLLOUTS = make_rollouts(24, group_ids=[f"p{row % 8}" for row in range(24)])


@pytest.fixture
def run(service: RunningService, checkpoints: Path) -> Iterator[ProbedRun]:
    started = start_run(service, ROLLOUTS)
    started.announce(weights_digest(checkpoints / "first"))
    yield started
    service.http.delete(f"/v1/runs/{started.run}")


def test_command_shows_the_departure(run: ProbedRun, checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["probe", run.run, "1", "--layers", "--url", run.service.url]
    assert main([*command, "--no-wait", "--json"]) == 0
    probe = json.loads(capsys.readouterr().out)
    log = run_worker(run.service, checkpoints)
    assert run.read(probe["id"])["state"] == "done", log
    assert "depart first at layers.0" in log
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "Hidden states of torch.trainer against torch.float32" in shown
    assert "torch.trainer and torch.float32 depart first at layers.0: " in " ".join(shown.split())
    (item,) = run.get("steps/1/layers")["items"]
    assert (item["states"], item["non_finite"], item["groups"]) == (ROLLOUTS.num_tokens, 0, 8)
    assert item["layers"][0]["distance"]["relative_l2"]["mean"] == 0.0
    assert item["compared_fingerprint"]["autocast"] == "bfloat16"
    assert item["reference_fingerprint"]["weights_digest"] == weights_digest(checkpoints / "first")
    with Reader(run.service.url) as reader:
        (found,) = reader.layers(run.run, 1, pair="torch.trainer/torch.float32")
    assert found.departure == "layers.0"
    assert (found.step, found.states, found.sentence) == (1, ROLLOUTS.num_tokens, item["sentence"])
