"""A matrix through the command, the real service and real engines: torch, and vLLM where it is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from foreshock.commands.main import main
from foreshock.digests import weights_digest
from foreshock.scorers import REFERENCE
from foreshock_probes.console import WorkerConsole
from foreshock_probes.engines.process import EnginePool
from foreshock_probes.worker import Worker
from tests.probes.conftest import RunningService
from tests.probes.test_worker import ProbedRun, settings, start_run
from tests.probes.tiny import make_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def run(service: RunningService, checkpoints: Path) -> Iterator[ProbedRun]:
    started = start_run(service, make_rollouts(48))
    started.announce(weights_digest(checkpoints / "first"))
    yield started
    service.http.delete(f"/v1/runs/{started.run}")


def matrix(run: ProbedRun, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Run the command; return the matrix that it prints."""
    command = ["probe", "matrix", run.run, "--step", "1", "--url", run.service.url, "--no-wait", "--json", *words]
    assert main(command) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def work(run: ProbedRun, checkpoints: Path, engines: EnginePool, scorers: tuple[str, ...], jobs: int) -> str:
    console = StringIO()
    chosen = settings(run.service, checkpoints)
    for _ in range(jobs):
        Worker(chosen, WorkerConsole(console), scorers=scorers, engines=engines).run(once=True, until_idle_seconds=60.0)
    return console.getvalue()


def test_torch_in_several_configurations(
    run: ProbedRun, checkpoints: Path, engines: EnginePool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--vary", "torch.trainer:head_dtype=null,float32", "--vary", "torch.trainer:autocast=bfloat16,null",
        "--vary", "torch.bfloat16:padding=none,sideways",
    )  # fmt: skip
    cells = matrix(run, capsys, *words)["cells"]
    work(run, checkpoints, engines, (REFERENCE, "torch.trainer", "torch.bfloat16"), len(cells))
    found = matrix(run, capsys, *words)
    assert [cell["probe"] for cell in found["cells"]] == [cell["probe"] for cell in cells]
    by_change = {(cell["scorer"], json.dumps(cell["changed"], sort_keys=True)): cell for cell in found["cells"]}
    refused = by_change["torch.bfloat16", '{"padding": "sideways"}']
    assert refused["state"] == "failed"
    assert "padding" in refused["reason"]
    others = [cell for cell in found["cells"] if cell is not refused]
    assert {cell["state"] for cell in others} == {"done"}
    assert all(cell["seconds_per_token"] > 0 for cell in others)
    # In float32 the trainer's pass is the reference's with other batches; in bfloat16 it is not.
    k3 = {key: cell["against_reference"]["k3_kl"] for key, cell in by_change.items() if cell["against_reference"]}
    exact = k3["torch.trainer", '{"autocast": null, "head_dtype": null}']
    plain = k3["torch.trainer", "{}"]
    assert exact < 1e-9 < 1e-6 < plain
    (sentence,) = found["recommendations"]
    assert "autocast=null" in sentence
    assert "time per token" in sentence


@pytest.mark.vllm
def test_vllm_and_torch_are_compared_in_every_combination(
    run: ProbedRun, checkpoints: Path, engines: EnginePool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--vary", "vllm.prefill:dtype=float32", "--vary", "torch.trainer:autocast=null")
    cells = matrix(run, capsys, *words)["cells"]
    assert len(cells) == 5
    work(run, checkpoints, engines, (REFERENCE, "torch.trainer", "vllm.prefill"), len(cells))
    found = matrix(run, capsys, *words)
    assert {cell["state"] for cell in found["cells"]} == {"done"}, found["cells"]
    assert len(found["pairs"]) == 4
    probes = {(cell["scorer"], bool(cell["changed"])): cell["probe"] for cell in found["cells"]}
    k3 = {(pair["trainer"], pair["engine"]): pair["mismatch"]["k3_kl"] for pair in found["pairs"]}
    assert min(k3, key=lambda pair: k3[pair]) == (probes["torch.trainer", True], probes["vllm.prefill", True])
    assert min(k3.values()) < 1e-9
    (sentence,) = found["recommendations"]
    assert "dtype=float32 in vllm.prefill" in sentence
    assert "autocast=null in torch.trainer" in sentence
