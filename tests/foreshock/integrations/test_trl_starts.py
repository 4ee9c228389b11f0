"""How a TRL trainer starts, resumes and agrees over its ranks, with real trainers and a real service, without vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.foreshock.integrations.preloaded import Preloaded, preloaded
from tests.foreshock.running_service import RunningService
from tests.ports import free_port

pytestmark = pytest.mark.slow

RATE = 1e-3

Start = Callable[..., tuple[list[Any], str]]


@pytest.fixture(scope="module")
def libraries() -> Iterator[Preloaded]:
    """A process that has imported TRL, which takes seconds of CPU time."""
    with preloaded("examples.trl.train", "trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer") as process:
        yield process


@pytest.fixture(scope="module")
def start(shared_service: RunningService, tmp_path_factory: pytest.TempPathFactory, libraries: Preloaded) -> Start:
    """Run a scenario of `trl_starts` in `ranks` processes: returns what each printed, and the output of all."""

    def run(scenario: str, ranks: int = 1, url: str | None = None) -> tuple[list[Any], str]:
        folder = tmp_path_factory.mktemp(scenario)
        settings = {"FORESHOCK_URL": url or shared_service.url, "FORESHOCK_RUN_KEY": f"trl-{scenario}",
                    "FORESHOCK_SPOOL_DIRECTORY": str(folder / "spool"), "FORESHOCK_EXIT_SECONDS": "5",
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks),
                    "OMP_NUM_THREADS": "1"}  # fmt: skip
        environments = [settings | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        ended = libraries.run(folder, "tests.foreshock.integrations.trl_starts", [str(folder), scenario], environments)
        for each in ended:
            assert each.returncode == 0, each.stderr[-4000:]
        lines = [next(line for line in each.stdout.splitlines() if line.startswith("LOG ")) for each in ended]
        return [json.loads(line[4:]) for line in lines], "".join(each.stderr for each in ended)

    return run


def test_checkpoint_that_only_the_first_rank_is_asked_for_is_saved_by_all(start: Start) -> None:
    """Saving is a collective: a rank that does not save would wait for the others in its backward pass for ever."""
    folders, _ = start("wanted", ranks=2)
    assert folders == [["checkpoint-2"]] * 2


def test_advice_is_taken_from_the_folder_that_was_resumed_from(start: Start) -> None:
    (rates,), _ = start("elsewhere", url=f"http://127.0.0.1:{free_port()}")
    assert rates["3"] == pytest.approx(RATE / 4)


def test_resume_from_a_folder_without_advice_waits_for_it(start: Start) -> None:
    (rates,), output = start("unsaved")
    assert rates["3"] == pytest.approx(RATE / 2)
    assert "did not answer" not in output


def test_each_train_of_a_trainer_is_an_attempt(start: Start, shared_service: RunningService) -> None:
    (status,), output = start("twice")
    assert status == "everything was delivered"
    assert "the client was closed" not in output
    with httpx.Client(base_url=shared_service.url, timeout=60) as http:
        runs = {each["key"]: each["id"] for each in http.get("/v1/runs").raise_for_status().json()["items"]}
        for key in ("trl-twice", "trl-twice-given"):
            attempts = http.get(f"/v1/runs/{runs[key]}/attempts").raise_for_status().json()["items"]
            assert [each["attempt"] for each in attempts] == [1, 2], key


def test_start_after_an_error_leaves_no_feed_and_no_rollouts(start: Start, shared_service: RunningService) -> None:
    """`auto_find_batch_size`, in releases of TRL that allow it, starts again like this."""
    (feeds,), _ = start("again")
    assert feeds == [1] * 3
    with httpx.Client(base_url=shared_service.url, timeout=60) as http:
        run = next(each["id"] for each in http.get("/v1/runs").json()["items"] if each["key"] == "trl-again")
        attempts = http.get(f"/v1/runs/{run}/attempts").raise_for_status().json()["items"]
        assert [each["attempt"] for each in attempts] == [1, 2]
        query = {"comparison": "rollout", "measure": ["num_rollouts"]}
        columns = http.get(f"/v1/runs/{run}/measurements", params=query).raise_for_status().json()["columns"]
        assert (columns["step"], columns["num_rollouts"]) == ([1, 2], [2, 2])
