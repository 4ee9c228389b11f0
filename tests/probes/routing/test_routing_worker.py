"""The worker, the service and the command compare the routes of a real mixture of experts end to end."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foreshock import Reader
from foreshock.commands.main import main
from foreshock.digests import weights_digest
from foreshock.routing import RoutingComparison
from tests.probes.conftest import RunningService
from tests.probes.test_worker import ProbedRun, run_worker, start_run
from tests.probes.tiny import make_rollouts, save_mixture_of_experts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LAYERS = 3
IN_FLOAT32 = {"torch.trainer": {"autocast": None, "master_dtype": "float32"}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a mixture of experts."""
    folder = tmp_path_factory.mktemp("weights")
    save_mixture_of_experts(folder / "experts", seed=1, layers=LAYERS)
    return folder


@pytest.fixture
def run(service: RunningService, root: Path) -> Iterator[ProbedRun]:
    started = start_run(service, make_rollouts(40, group_ids=[f"prompt-{row // 4}" for row in range(40)]))
    started.announce(weights_digest(root / "experts"), path="experts")
    yield started
    service.http.delete(f"/v1/runs/{started.run}")


def read(run: ProbedRun) -> tuple[RoutingComparison, ...]:
    with Reader(run.service.url) as reader:
        return reader.routing(run.run, 1)


def test_equal_precision_agrees_and_bfloat16_which_the_command_asks_for_does_not(
    run: ProbedRun, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts = make_rollouts(40)
    same = run.probe("torch.trainer", "torch.float32", kind="routing", environment="any", options=IN_FLOAT32)
    log = run_worker(run.service, root)
    assert run.read(same)["state"] == "done", log
    (found,) = read(run)
    assert [each.agreement.mean for each in found.measures.layers] == [1.0] * LAYERS
    assert (found.measures.any_difference.mean, found.measures.all_tokens.tokens) == (0.0, rollouts.num_tokens)
    assert found.target_fingerprint["dtype"] == "float32"
    assert found.target_fingerprint["weights_digest"] == weights_digest(root / "experts")
    words = ["--routing", "--scorer", "torch.bfloat16", "--scorer", "torch.float32", "--environment", "any"]
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(run_worker, run.service, root)
        status = main(["probe", run.run, "1", *words, "--url", run.service.url])
        assert "routes: torch.bfloat16: " in worker.result()
    text = capsys.readouterr().out
    assert status == 0, text
    assert "Routed experts of torch.bfloat16 (π) and torch.float32 (μ), 2 per token and layer" in text
    newest, before = read(run)
    assert (newest.target, before.target) == ("torch.bfloat16", "torch.trainer")
    assert newest.measures.groups == 10
    share = newest.measures.any_difference
    assert 0.0 < share.low <= share.mean <= share.high <= 1.0
