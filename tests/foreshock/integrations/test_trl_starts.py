"""How a TRL trainer starts, resumes and agrees over its ranks, with real trainers and a real service, without vLLM."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from foreshock.comparisons import STEP_ROW
from tests.foreshock.integrations.logged_runs import LoggedRun, run_named
from tests.foreshock.integrations.preloaded import Preloaded, preloaded
from tests.foreshock.running_service import RunningService
from tests.ports import free_port

pytestmark = pytest.mark.slow

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
        return libraries.run(folder, "tests.foreshock.integrations.trl_starts", [str(folder), scenario], environments)

    return run


def test_checkpoint_that_only_the_first_rank_is_asked_for_is_saved_by_all(start: Start) -> None:
    """Saving is a collective: a rank that does not save would wait for the others in its backward pass for ever."""
    folders, _ = start("wanted", ranks=2)
    assert folders == [["checkpoint-2"]] * 2


def test_advice_is_taken_from_the_folder_that_was_resumed_from(start: Start) -> None:
    (scales,), _ = start("elsewhere", url=f"http://127.0.0.1:{free_port()}")
    assert scales["3"] == pytest.approx(1 / 4)


def test_resume_from_a_folder_without_advice_waits_for_it(start: Start) -> None:
    (scales,), output = start("unsaved")
    assert scales["3"] == pytest.approx(1 / 2)
    assert "did not answer" not in output


def test_each_train_of_a_trainer_is_an_attempt(start: Start, http: httpx.Client) -> None:
    (status,), output = start("twice")
    assert status == "everything was delivered"
    assert "the client was closed" not in output
    for key in ("trl-twice", "trl-twice-given"):
        assert [each["attempt"] for each in LoggedRun(http, run_named(http, key)).attempts] == [1, 2], key


def test_start_after_an_error_leaves_no_feed_and_no_rollouts(start: Start, http: httpx.Client) -> None:
    """`auto_find_batch_size`, in releases of TRL that allow it, starts again like this."""
    (feeds,), _ = start("again")
    assert feeds == [1] * 3
    run = LoggedRun(http, run_named(http, "trl-again"))
    assert [each["attempt"] for each in run.attempts] == [1, 2]
    columns = run.measures(STEP_ROW, "num_rollouts")
    assert (columns["step"], columns["num_rollouts"]) == ([1, 2], [2, 2])
