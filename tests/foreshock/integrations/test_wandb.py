"""A real W&B run, offline, is mirrored by one line: its scalars, its tables of rollouts, its end."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import foreshock
from foreshock.errors import ConfigurationError
from tests.foreshock.batches import random_batch
from tests.foreshock.client.trainer import get
from tests.foreshock.running_service import RunningService

wandb = pytest.importorskip("wandb")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_service: RunningService) -> Iterator[Any]:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("FORESHOCK_URL", shared_service.url)
    monkeypatch.setenv("FORESHOCK_SPOOL_DIRECTORY", str(tmp_path / "spool"))
    started = wandb.init(project="foreshock-tests", mode="offline", dir=str(tmp_path))
    yield started
    started.finish()


def table_of(step: int, *left_out: str) -> Any:
    batch = random_batch(step)
    ends = list(zip(batch.response_offsets, batch.response_offsets[1:], strict=False))
    prompts = list(zip(batch.prompt_offsets, batch.prompt_offsets[1:], strict=False))
    columns: dict[str, list[Any]] = {
        "prompt_token_ids": [batch.prompt_token_ids[a:b].tolist() for a, b in prompts],
        "response_token_ids": [batch.response_token_ids[a:b].tolist() for a, b in ends],
        "my note": ["a note"] * batch.num_rollouts,
    }
    for name in ("rollout_log_probs", "trainer_log_probs"):
        columns[name] = [getattr(batch, name)[a:b].tolist() for a, b in ends]
    for name in left_out:
        del columns[name]
    return wandb.Table(columns=[*columns], data=[list(row) for row in zip(*columns.values(), strict=True)])


def test_scalars_and_tables_of_rollouts_arrive_and_the_run_ends_with_that_of_wandb(run: Any) -> None:
    client = foreshock.watch_wandb(model="M")
    for step in range(1, 4):
        wandb.log({"actor": {"loss": step / 10}, "reward": step / 4, "note": "text", "foreshock/k3_kl": 7.0}, step=step)
        wandb.log({"rollouts": table_of(step)}, step=step, commit=True)
    run.log({"rollouts": table_of(4, "response_token_ids")}, step=4)
    run.finish()
    found = get(client, "")
    assert (found["key"], found["model"], found["state"]) == (run.id, "M", "finished")
    assert found["tracker_url"] is None, "an offline run has no page"
    scalars = get(client, "/scalars")["columns"]
    expected = {(name, step, step / by) for name, by in (("actor/loss", 10), ("reward", 4)) for step in range(1, 4)}
    assert set(zip(scalars["name"], scalars["step"], scalars["value"], strict=True)) == expected
    measured = get(client, "/measurements", comparison="trainer/rollout", measure="k3_kl")["columns"]
    assert measured["step"] == [1, 2, 3]
    assert all(value > 0 for value in measured["k3_kl"])


def test_step_is_the_row_without_a_step_and_nothing_is_raised(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = foreshock.watch_wandb(run)
    wandb.log({"reward": 0.5})
    wandb.log({"reward": 0.75, "rollouts": table_of(1, "prompt_token_ids")})
    client.flush(60)
    scalars = get(client, "/scalars")["columns"]
    assert dict(zip(scalars["step"], scalars["value"], strict=True)) == {0: 0.5, 1: 0.75}
    assert "'rollouts' is not logged as rollouts: it has no column prompt_token_ids" in caplog.text
    run.finish(exit_code=1)
    assert get(client, "")["state"] == "failed"


def test_run_of_a_client_links_to_the_active_run_of_wandb(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "https://wandb.ai/me/project/runs/1"
    monkeypatch.setattr(type(run), "offline", property(lambda _: False))
    monkeypatch.setattr(type(run), "url", property(lambda _: page))
    with foreshock.Client(run_key="beside W&B") as client:
        client.start_run().log_scalars(1, {"reward": 0.5})
        client.flush(60)
    assert get(client, "")["tracker_url"] == page


def test_without_a_run_of_wandb_the_error_says_what_to_do() -> None:
    assert wandb.run is None
    with pytest.raises(ConfigurationError, match="no active W&B run"):
        foreshock.watch_wandb()
