"""Tests of the client and the feed with the real service, through restarts of the service."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreshock import AdviceFeed, Client, RolloutBatch
from foreshock.errors import ConfigurationError
from foreshock.learning_rate.length_decay import DECAY_FLOOR, warmed
from foreshock.measures.comparison import measure_step
from tests.foreshock.batches import random_batch
from tests.foreshock.client.trainer import clients, get
from tests.foreshock.running_service import RunningService
from tests.paths import DOCS
from tests.waiting import wait_until

PAGE = DOCS / "connect-a-trainer.md"


@pytest.fixture
def make(real_service: RunningService, tmp_path: Path) -> Iterator[Callable[..., Client]]:
    with clients(real_service.url, tmp_path / "spool", strict=True) as make_client:
        yield make_client


def half(batch: RolloutBatch, part: int) -> RolloutBatch:
    return batch.select(range(part * batch.num_rollouts // 2, (part + 1) * batch.num_rollouts // 2))


def test_logged_rollouts_are_measured(make: Callable[..., Client]) -> None:
    client = make("measured", project="team", attempt_key="one process logs both shards")
    client.start_run(model="M", trainer="T", engine="E", hardware="H", initial_learning_rate=1e-6, length_cap=99)
    batches = {step: random_batch(step) for step in range(4)}
    for step, batch in batches.items():
        client.log_rollouts(step, half(batch, 1), shard=1, shards=2)
        client.log_rollouts(step, half(batch, 0), shard=0, shards=2)
        client.log_scalars(step, {"grad_norm": 0.5 + step, "loss": float("inf")})
    client.finish()
    assert client.flush(300)
    run = get(client, "")
    assert {name: run[name] for name in ("key", "project", "model", "state", "last_step", "length_cap")} == {
        "key": "measured", "project": "team", "model": "M", "state": "finished", "last_step": 3, "length_cap": 99,
    }  # fmt: skip
    columns = get(client, "/measurements", comparison="trainer/rollout")["columns"]
    assert columns["step"] == [0, 1, 2, 3]
    for step, batch in batches.items():
        measured = measure_step(batch).comparisons["trainer/rollout"].statistics.measures()
        for name in ("k3_kl", "kl", "chi2_token", "tail_2", "mean_abs_d"):
            assert columns[name][step] == pytest.approx(measured[name], rel=1e-9)
    scalars = get(client, "/scalars", name="grad_norm")["columns"]
    assert scalars["value"] == [0.5, 1.5, 2.5, 3.5]
    assert client.counters.rejected == client.counters.dropped == 0


def test_invalid_fields_of_a_description_are_left_out_and_the_others_arrive(
    make: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    client = make("described")
    client.start_run(
        model="M", trainer="T" * 5000, tracker_url="javascript:alert(1)", length_cap=99, advice_mode="apply"
    )
    client.log_scalars(1, {"loss": 1.0})
    assert client.flush(300)
    run = get(client, "")
    assert [run[name] for name in ("model", "trainer", "tracker_url", "length_cap", "advice_mode")] == [
        "M", None, None, 99, "apply",
    ]  # fmt: skip
    assert "the service refused trainer and tracker_url of the run's description: left out: " in caplog.text


def test_the_model_kind_is_declared_or_read_from_the_checkpoint(make: Callable[..., Client], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 128}')
    for key, declared, kind in (("declared", "dense", "dense"), ("derived", None, "moe")):
        client = make(key)
        client.start_run(model_kind=declared)  # type: ignore[arg-type]
        client.log_checkpoint(1, root="weights", path="step_1", local_folder=tmp_path)
        assert client.flush(300)
        assert get(client, "")["model_kind"] == kind
        assert get(client, "/checkpoints")["items"][0]["model_kind"] == "moe"
    with pytest.raises(ConfigurationError, match=r"model_kind must be one of dense, moe or None, got 'sparse'"):
        make("wrong").start_run(model_kind="sparse")  # type: ignore[arg-type]


def test_restart_loses_no_delivery(make: Callable[..., Client], real_service: RunningService, tmp_path: Path) -> None:
    client = make("restarted")
    for step in range(12):
        client.log_rollouts(step, random_batch(step))
        if step == 3:
            real_service.stop()
        if step == 8:
            wait_until(lambda: client.counters.spooled > 0, 120)
            real_service.start()
    assert client.flush(300)
    steps = get(client, "/steps")["items"]
    assert [item["step"] for item in steps] == list(range(12))
    assert all(item["closed"] for item in steps)
    assert client.counters.spooled > 0
    assert client.counters.rejected == client.counters.dropped == 0


def test_restart_without_its_step_is_warned_of(make: Callable[..., Client], caplog: pytest.LogCaptureFixture) -> None:
    # The third logs from its first step on, in order: what follows step 1 is no first step.
    for attempt, resume_step, first in (("a", 0, 1), ("b", 6, 6), ("c", 0, 0), ("d", 0, 8)):
        client = make("restarted-without-step", attempt_key=attempt)
        client.start_run(resume_step=resume_step)
        for step in range(first, first + 4):
            client.log_rollouts(step, random_batch(step))
        assert client.flush(300)
        client.close()
    (warning,) = [each.getMessage() for each in caplog.records if "supersedes" in each.getMessage()]
    assert warning.startswith("attempt 4 of the run began at step 0")
    assert warning.endswith("pass resume_step=8 to start_run")


def test_example_of_the_page_runs(
    real_service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.setenv("FORESHOCK_SPOOL_DIRECTORY", str(tmp_path / "spool"))
    names: dict[str, Any] = {}
    exec(code.replace("http://127.0.0.1:8765", real_service.url).replace("my-run", "page"), names)
    client = names["client"]
    assert get(client, "")["state"] == "finished"
    columns = get(client, "/measurements", comparison="trainer/rollout")["columns"]
    assert columns["step"] == [1, 2, 3, 4, 5]
    assert client.counters.rejected == client.counters.dropped == client.counters.invalid == 0


def test_launch_that_the_service_missed_does_not_supersede_the_next(
    make: Callable[..., Client], real_service: RunningService, tmp_path: Path
) -> None:
    """The second launch has another API key: it adopts the first one's items after its own attempt is registered."""
    real_service.stop()
    first = Client(
        real_service.url, api_key="old-key", run_key="missed", spool_directory=tmp_path / "spool",
        attempt_key="launch-1",
    )  # fmt: skip
    first.start_run()
    for step in range(4):
        first.log_rollouts(step, random_batch(step))
    assert first.close(1).undelivered
    real_service.start()
    second = make("missed", attempt_key="launch-2")
    second.start_run()
    for step in range(3):
        second.log_rollouts(step, random_batch(10 + step))
    assert second.flush(300).complete
    assert [each["key"] for each in get(second, "/attempts")["items"]] == ["launch-2", "launch-1"]
    assert [(each["step"], each["attempt"]) for each in get(second, "/steps")["items"]] == [(0, 1), (1, 1), (2, 1)]
    assert get(second, "/lr-advice/decisions")["items"] == []


@pytest.mark.parametrize("rank", [{}, {"shard": 0, "shards": 1}], ids=["undeclared", "one shard"])
def test_a_run_that_starts_again_in_one_process_keeps_its_new_rollouts(
    make: Callable[..., Client], monkeypatch: pytest.MonkeyPatch, rank: dict[str, Any]
) -> None:
    """A notebook, or a script that runs again where an engine has set the launcher's variables."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC", "PMIX", "FORESHOCK_AT"))]:
        monkeypatch.delenv(name)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    clients = [make(f"again {sorted(rank)}") for _ in range(2)]
    for number, client in enumerate(clients):
        client.start_run(**rank)
        for step in range(3):
            client.log_rollouts(step, random_batch(10 * number + step))
        assert client.flush(60).complete
    assert [client.attempt for client in clients] == [1, 2]
    steps = get(clients[1], "/steps")["items"]
    assert {(step["step"], step["attempt"]) for step in steps} >= {(0, 2), (1, 2), (2, 2)}


@pytest.mark.parametrize("mode", ["apply", "shadow"])
def test_feed_follows_operator_halving(make: Callable[..., Client], mode: Any) -> None:
    client = make(f"advised-{mode}")
    client.start_run(advice_mode=mode)
    with AdviceFeed(client) as feed:
        for step in range(5):
            client.log_rollouts(step, random_batch(step))
            assert feed.scale(step) == (warmed(1.0, step, DECAY_FLOOR) if mode == "apply" else 1.0)
        assert client.flush(300)
        url = f"{client.settings.url}/v1/runs/{client.run_id}/lr-advice"
        decisions = url.replace("/lr-advice", "/advice/decisions")
        decided = httpx.post(decisions, json={"kind": "halve", "reason": "a test"}, timeout=60)
        decided.raise_for_status()
        wait_until(lambda: feed.advised_scale(100) == 0.5, 120)
        assert (feed.mode, feed.scale(100)) == (mode, 0.5 if mode == "apply" else 1.0)
        assert feed.scale(4) == 1.0
        before = httpx.get(url, params={"step": 100}, timeout=60).json()
        assert before["applied"] is None
        for _ in range(2):  # a repeated report changes nothing
            feed.acknowledge(100, feed.scale(100) * 1e-6, feed.scale(100))
        assert client.flush(300)
        answer = httpx.get(url, params={"step": 100}, timeout=60).json()
        assert answer["scale"] == feed.scale(100)
        reported = {name: answer["applied"][name] for name in ("step", "revision", "learning_rate", "scale")}
        assert reported == {
            "step": 100, "revision": feed.revision, "learning_rate": feed.scale(100) * 1e-6, "scale": feed.scale(100)
        }  # fmt: skip
        assert client.counters.rejected == 0


def test_announced_change_is_in_the_runs_changes_and_a_bad_kind_is_refused(make: Callable[..., Client]) -> None:
    client = make("announces")
    client.start_run(model="M")
    client.log_change(7, "length_cap", before=2048, after=4096)
    with pytest.raises(ConfigurationError, match="kind must be one of length_cap, curriculum"):
        client.log_change(7, "weather")  # type: ignore[arg-type]
    client.log_rollouts(7, random_batch(7))
    assert client.flush(30)
    (change,) = get(client, "/changes")["items"]
    assert (change["step"], change["kind"], change["before"], change["after"]) == (7, "length_cap", 2048, 4096)


@pytest.mark.parametrize(("lever", "asked"), [("rate", "apply"), ("correction", "apply"), ("rollback", "shadow")])
def test_restart_that_asks_for_another_mode_of_a_lever_is_warned_once(
    make: Callable[..., Client], caplog: pytest.LogCaptureFixture, lever: str, asked: str
) -> None:
    name = {"rate": "advice_mode"}.get(lever, f"{lever}_mode")
    modes: dict[str, Any] = {name: asked}
    client = make(f"lever-{lever}")
    client.start_run(**modes)
    assert client.flush(60)
    assert get(client, "/advice")[lever]["mode"] == asked
    assert "is not used" not in caplog.text
    url = f"{client.settings.url}/v1/runs/{client.run_id}"
    httpx.patch(url, json={name: "shadow"}, timeout=60).raise_for_status()
    for step in (2, 3):
        client.start_run(resume_step=step, **modes)
        assert client.flush(60)
    assert get(client, "/advice")[lever]["mode"] == "shadow"
    warnings = caplog.text.count(f"{name}='{asked}' is not used: the run lever-{lever} exists in mode 'shadow'")
    assert warnings == (asked != "shadow")


def test_restart_keeps_the_mode_of_an_operator(make: Callable[..., Client], caplog: pytest.LogCaptureFixture) -> None:
    client = make("switched")
    client.start_run()
    assert client.flush(60)
    url = f"{client.settings.url}/v1/runs/{client.run_id}"
    httpx.patch(url, json={"advice_mode": "apply"}, timeout=60).raise_for_status()
    client.start_run(resume_step=2)
    assert client.flush(60)
    assert get(client, "")["advice_mode"] == "apply"
    assert "is not used" not in caplog.text
