"""Tests of the client against a faulty service: it never raises or waits, keeps its data, and counts what it drops."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreshock.api.runs import MOST_SCALARS
from foreshock.client.reporting import LogOnce
from foreshock.digests import weights_digest
from foreshock.rollouts import BatchAttributes, decode_rollouts
from foreshock.rollouts.parquet import encode_rollouts_view
from tests.foreshock.client.faulty_service import FaultyService, Received, faulty_service
from tests.foreshock.client.trainer import rollouts, spooled_bodies
from tests.ports import free_port
from tests.waiting import wait_until


def test_requests_follow_the_http_contract(make: Any, service: FaultyService) -> None:
    client = make(project="team", attempt_key="first", api_key="fsk_secret")
    attributes = BatchAttributes(logprobs_mode="raw_logprobs")
    client.start_run(model="M", length_cap=9, resume_step=4, advice_mode="apply", attributes=attributes)
    client.log_rollouts(5, rollouts(), shard=1, shards=2)
    client.log_scalars(5, {"grad_norm": np.float32(0.5), "entropy": float("nan")}, source="actor")
    client.log_scalars(5, {})
    client.log_checkpoint(5, root="nfs", path="step_5", digest="sha256:" + "0" * 64, weights_version=5)
    client.acknowledge(3, 5, 1e-6)
    client.finish()
    assert client.flush(60)
    assert {item.headers["Authorization"] for item in service.received} == {"Bearer fsk_secret"}
    sent = [item for item in service.received if "advice" not in item.path or item.method == "POST"]
    run, attempt, batch, scalars, checkpoint, ack, state = sent
    assert (run.path, run.json()) == (
        "/v1/runs", {"project": "team", "key": "run", "model": "M", "length_cap": 9, "advice_mode": "apply"}
    )  # fmt: skip
    registered = attempt.json()
    assert 0 <= registered.pop("age_seconds") < 60
    assert registered == {"key": "first", "resume_step": 4, "fingerprint": {}, "heartbeats": True}
    assert (batch.method, batch.path) == ("PUT", "/v1/runs/run-run/steps/5/rollouts/1")
    assert batch.query == {"attempt": "1", "shards": "2"}
    assert batch.headers["Content-Type"] == "application/vnd.apache.parquet"
    decoded = decode_rollouts(batch.body)
    assert decoded.sample_ids == ["5-1-0", "5-1-1", "5-1-2"]
    assert decoded.attributes == BatchAttributes(logprobs_mode="raw_logprobs", length_cap=9)
    assert scalars.json() == {"source": "actor", "values": {"grad_norm": 0.5, "entropy": None}}
    assert checkpoint.path == "/v1/runs/run-run/checkpoints/5"
    assert checkpoint.json()["format"] == "hf_safetensors"
    assert ack.json() == {"revision": 3, "step": 5, "applied_lr": 1e-6, "attempt": 1}
    assert (state.method, state.json()) == ("PATCH", {"state": "finished", "attempt": 1})
    assert (client.run_id, client.attempt) == ("run-run", 1)
    assert (client.counters.delivered, client.counters.dropped) == (6, 0)


def test_scalar_that_no_service_takes_is_left_out_and_the_others_arrive(make: Any, service: FaultyService) -> None:
    client = make()
    client.start_run()
    wrong = {
        "a" * 201: 1.0, "": 1.0, "two\nlines": 1.0, "line\n": 1.0, "huge": 10**400, "text": "x", "vector": np.ones(2),
    }  # fmt: skip
    client.log_scalars(1, {"before": 1, **wrong, "after": 2})
    client.log_scalars(2**31, {"x": 1})
    client.log_scalars(3, {f"layer {each}": each for each in range(MOST_SCALARS + 1)})
    assert not client.flush(60)
    first, many, rest = (json.loads(body)["values"] for body in service.bodies("/scalars"))
    assert first == {"before": 1.0, "after": 2.0}
    assert (len(many), rest) == (MOST_SCALARS, {f"layer {MOST_SCALARS}": MOST_SCALARS})
    assert client.counters.invalid == len(wrong) + 1


def test_tensor_with_a_gradient_is_logged_as_its_number(make: Any, service: FaultyService) -> None:
    torch = pytest.importorskip("torch", reason="the base install has none")
    client = make()
    client.start_run()
    client.log_scalars(1, {"loss": torch.tensor(0.5, requires_grad=True)})
    assert client.flush(60)
    assert [json.loads(body)["values"] for body in service.bodies("/scalars")] == [{"loss": 0.5}]


def test_modes_that_cannot_be_read_are_said_once_and_lose_nothing(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = make()
    for step in (1, 2):
        client.start_run(correction_mode="apply", resume_step=step)
        client.log_scalars(step, {"x": 1.0})
    assert client.flush(60)
    # Two starts, and the scalars of each.
    assert (client.counters.delivered, client.counters.rejected) == (4, 0)
    assert caplog.text.count("whether the run run has the modes that were asked for is unknown") == 1


def test_context_manager_marks_run_finished_or_failed(make: Any, service: FaultyService) -> None:
    with make(run_key="good") as client:
        client.log_scalars(1, {"x": 1})
    with pytest.raises(ZeroDivisionError), make(run_key="bad").start_run():
        raise ZeroDivisionError
    assert [item.json() for item in service.received if item.method == "PATCH"] == [
        {"state": "finished", "attempt": 1},
        {"state": "failed", "attempt": 1},
    ]


def test_client_started_without_service_delivers_the_same_bytes_later(make: Any, tmp_path: Path) -> None:
    port = free_port()
    client = make(url=f"http://127.0.0.1:{port}")
    client.start_run()
    for step in range(6):
        client.log_rollouts(step, rollouts(step))
        client.log_scalars(step, {"step": step})
    wait_until(lambda: client.counters.spooled == 13)
    bytes_on_disk = [body for body in spooled_bodies(tmp_path / "spool") if len(body) > 1000]
    assert len(bytes_on_disk) == 6
    with faulty_service(port=port) as service:
        assert client.flush(60)
        assert service.bodies("rollouts") == bytes_on_disk
        steps = [int(path.split("/")[5]) for path in service.paths() if "/steps/" in path]
        assert steps == [step for step in range(6) for _ in range(2)]
        client.close()
    assert client.counters.delivered == 13
    assert not list((tmp_path / "spool").iterdir())


FAULTS: list[Any] = [
    400, 401, 403, 404, 405, 408, 411, 413, 415, 421, 429, 500, 502, 503, 507, "reset", "half", "html",
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_temporary_failure_is_retried_until_delivered(make: Any, service: FaultyService, fault: Any) -> None:
    service.faults.extend([fault] * 3)
    client = make()
    client.log_rollouts(1, rollouts())
    assert client.flush(60)
    assert len(service.bodies("rollouts")) == 1
    assert client.counters.rejected == client.counters.dropped == 0
    if fault not in ("html", 404):
        assert client.counters.failed_requests == 3


@pytest.mark.parametrize("status", [403, 413, 500])
def test_refusal_that_a_configuration_mends_keeps_the_bytes(
    make: Any, service: FaultyService, tmp_path: Path, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    service.always = lambda received: status if "/rollouts/" in received.path else None
    client = make()
    for step in range(3):
        client.log_rollouts(step, rollouts(step))
    refused = client.flush(1.0)
    assert not refused
    assert (refused.undelivered, refused.rejected, refused.dropped) == (3, 0, 0)
    assert f"injected {status}" in str(refused)
    assert len(spooled_bodies(tmp_path / "spool")) == 3
    service.always = None
    assert client.flush(60)
    assert len(service.bodies("rollouts")) == 3
    assert client.counters.rejected == client.counters.dropped == 0
    warnings = [record.message for record in caplog.records if f"injected {status}" in record.message]
    assert len(warnings) == 1


@pytest.mark.parametrize("status", [413, 500])
def test_refused_item_does_not_hold_up_the_others(make: Any, service: FaultyService, status: int) -> None:
    service.always = lambda received: status if "/steps/1/rollouts" in received.path else None
    client = make()
    for step in range(4):
        client.log_rollouts(step, rollouts(step))
    client.finish()
    wait_until(lambda: len(service.bodies("rollouts")) == 3)
    wait_until(lambda: client.counters.delivered == 5)
    status_now = client.close()
    assert (status_now.undelivered, status_now.rejected) == (1, 0)


def test_wrong_description_delays_nothing(make: Any, service: FaultyService, caplog: pytest.LogCaptureFixture) -> None:
    service.always = lambda received: 422 if received.path == "/v1/runs" and "model" in received.json() else None
    client = make()
    client.start_run(model="M" * 300, resume_step=4)
    client.log_rollouts(5, rollouts())
    assert client.flush(60)
    assert len(service.bodies("rollouts")) == 1
    assert "the service refused all of the run's description: left out: " in caplog.text


def test_status_says_what_is_missing_and_close_prints_it_once(
    make: Any, service: FaultyService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.always = lambda received: {"1": 422, "2": 413}.get(received.path.split("/")[5:6][0]) if (
        "/rollouts/" in received.path) else None  # fmt: skip
    client = make()
    for step in range(3):
        client.log_rollouts(step, rollouts(step))
    client.log_rollouts(3, {"prompt_token_ids": [[1]]})
    status = client.flush(1.0)
    assert (status.undelivered, status.rejected, status.invalid, status.complete) == (1, 1, 1, False)
    assert client.close() == client.close()
    printed = capsys.readouterr().err
    assert printed.count("1 not delivered, 1 rejected, 1 invalid") == 1
    assert "injected 413" in printed
    assert str(client.settings.spool_directory) in printed
    service.always = None
    good = make(run_key="good")
    good.log_rollouts(0, rollouts())
    assert good.close()
    # The address of the run's page and nothing else.
    assert capsys.readouterr().err == f"foreshock: {service.url}/runs/default/good\n"


@pytest.mark.parametrize("status", [409, 410, 422])
def test_rejected_delivery_is_counted_and_kept_with_its_reason(
    make: Any, service: FaultyService, tmp_path: Path, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    service.always = lambda received: status if "/rollouts/" in received.path else None
    client = make()
    for step in range(3):
        client.log_rollouts(step, rollouts(step))
    client.log_scalars(9, {"x": 1})
    assert (client.flush(60).undelivered, client.flush().rejected) == (0, 3)
    assert (client.counters.rejected, client.counters.delivered) == (3, 2)
    kept = sorted((tmp_path / "spool").glob("*.rejected"))
    assert len(kept) == 3
    head, _, body = kept[0].read_bytes().partition(b"\n")
    assert json.loads(head)["kind"] == "rollouts"
    assert decode_rollouts(body).num_rollouts == 3
    for path in kept:
        (line,) = [record.message for record in caplog.records if str(path) in record.message]
        assert f"injected {status}" in line


def test_bytes_that_are_called_invalid_once_are_sent_again(make: Any, service: FaultyService) -> None:
    """The client encoded them itself: a proxy or a full disk may have cut what the service got."""
    refused: list[str] = []

    def cut(received: Received) -> int | None:
        if "/rollouts/" not in received.path or received.path in refused:
            return None
        refused.append(received.path)
        return 422

    service.always = cut
    client = make()
    for step in range(3):
        client.log_rollouts(step, rollouts(step))
    assert client.flush(60)
    assert (len(refused), client.counters.rejected, len(service.bodies("rollouts"))) == (3, 0, 3)


def test_reason_is_of_what_is_missing_now(make: Any, service: FaultyService) -> None:
    service.always = 503
    client = make()
    client.log_scalars(1, {"x": 1})
    assert "injected 503" in str(client.flush(0.5).reason)
    service.always = None
    assert client.flush(60).reason is None
    service.always = lambda received: 413 if "/steps/2/" in received.path else None
    client.log_scalars(2, {"x": 1})
    client.log_scalars(3, {"x": 1})
    wait_until(lambda: len(service.bodies("steps/3/")) == 1)
    assert "injected 413" in str(client.flush(0.2).reason), "what was delivered since is another item"
    service.always = lambda received: "held" if "/steps/4/" in received.path else None
    assert client.flush(60)
    client.log_scalars(4, {"x": 1})
    slow = client.flush(0.2)
    assert (slow.undelivered, slow.reason) == (1, None), "nothing fails"


def test_heartbeats_go_on_when_the_run_is_registered_again(make: Any, service: FaultyService) -> None:
    """A database was restored: the service knows neither run nor attempt until the next delivery registers them."""
    client = make(heartbeat_seconds=0.05)
    client.log_scalars(1, {"x": 1})
    wait_until(lambda: bool(service.bodies("/clients/")), 60)
    service.always = lambda received: 404 if "/clients/" in received.path else None
    before = service.requests
    wait_until(lambda: service.requests > before, 60)
    service.always = None
    before = len(service.bodies("/clients/"))
    client.log_scalars(2, {"x": 1})
    wait_until(lambda: len(service.bodies("/clients/")) > before, 20)


def test_heartbeats_repeat_what_a_hook_warns_of(make: Any, service: FaultyService) -> None:
    client, hook = make(heartbeat_seconds=60.0), LogOnce("foreshock.tests")
    client.tell_remarks_of(hook)
    client.start_run(shard=0, shards=1)
    hook.warning("shape", "entropy has [4] and the responses have [4, 6]: it is not logged")
    hook.warning("shape", "said once")
    hook.exception("loop", "log_rollouts could not be observed", TypeError("no rows"))
    assert client.flush(60)
    assert client.close(60)
    assert json.loads(service.bodies("/clients/")[-1])["remarks"] == [
        "entropy has [4] and the responses have [4, 6]: it is not logged",
        "log_rollouts could not be observed: TypeError: no rows",
    ]


def test_slow_service_delays_neither_trainer_nor_encoder(make: Any, service: FaultyService) -> None:
    service.always = "held"
    client = make(timeout_seconds=60.0)
    for step in range(12):
        client.log_rollouts(step, rollouts(step))
    wait_until(lambda: len(spooled_bodies(client.settings.spool_directory)) == 12)
    assert service.received == []
    service.released.set()
    assert client.flush(60)
    assert len(service.bodies("rollouts")) == 12
    assert client.counters.dropped == 0


def test_unanswered_request_fails_after_the_timeout(make: Any, service: FaultyService) -> None:
    service.always = "held"
    client = make(timeout_seconds=0.2)
    client.log_scalars(1, {"x": 1})
    wait_until(lambda: client.counters.failed_requests >= 2)
    assert client.counters.spooled >= 1
    started = time.perf_counter()
    client.close(1.0)
    assert time.perf_counter() - started < 20


def test_retry_after_is_respected(make: Any, service: FaultyService) -> None:
    service.faults.append(429)
    service.retry_after = "2"
    client = make()
    client.log_scalars(1, {"x": 1})
    wait_until(lambda: client.counters.delivered == 2)
    refused, again, *_ = service.asked_at
    assert again - refused >= 2


def test_full_queue_drops_and_counts(
    make: Any, service: FaultyService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from foreshock.client import capture

    encode, all_logged = encode_rollouts_view, threading.Event()
    monkeypatch.setattr(capture, "encode_rollouts_view", lambda batch: (all_logged.wait(), encode(batch))[1])
    client = make(max_queue_items=3)
    for step in range(10):
        client.log_rollouts(step, rollouts(step))
    all_logged.set()
    assert client.flush(60).undelivered == 0
    counters = client.counters.snapshot()
    assert counters.dropped_queue_full == counters.dropped >= 7
    assert len(service.bodies("rollouts")) + counters.dropped == 10
    assert counters.dropped_bytes > 0
    assert sum("is dropped" in record.message for record in caplog.records) == 1


def test_block_when_full_waits_instead_of_dropping(make: Any, service: FaultyService) -> None:
    client = make(max_queue_items=1, block_when_full=True)
    for step in range(10):
        client.log_rollouts(step, rollouts(step))
    assert client.flush(60)
    assert (len(service.bodies("rollouts")), client.counters.dropped) == (10, 0)


def test_full_spool_drops_the_newest_and_counts_them(make: Any, tmp_path: Path) -> None:
    port = free_port()
    client = make(url=f"http://127.0.0.1:{port}", max_spool_bytes=4000, max_memory_bytes=2000)
    for step in range(10):
        client.log_rollouts(step, rollouts(step))
    wait_until(lambda: client.counters.dropped_spool_full > 0 and not client._background._held_items)
    lost = client.counters.dropped
    with faulty_service(port=port) as service:
        assert client.flush(60).undelivered == 0
        steps = [int(path.split("/")[5]) for path in service.paths() if "rollouts" in path]
    assert steps == list(range(10 - lost))
    assert spooled_bodies(tmp_path / "spool") == []


def test_unusable_spool_keeps_items_in_memory(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    port = free_port()
    client = make(url=f"http://127.0.0.1:{port}", spool_directory=tmp_path / "file")
    for step in range(4):
        client.log_rollouts(step, rollouts(step))
    wait_until(lambda: client.counters.failed_requests > 0)
    with faulty_service(port=port) as service:
        assert client.flush(60)
        assert len(service.bodies("rollouts")) == 4
    assert any("cannot be used" in record.message for record in caplog.records)


def test_checkpoint_digest_is_computed_in_the_background(make: Any, service: FaultyService, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    client = make()
    client.log_checkpoint(3, root="r", path="p", local_folder=tmp_path)
    client.log_checkpoint(4, root="r", path="p", local_folder=tmp_path / "missing")
    assert client.flush(60).undelivered == 0
    (item,) = [item for item in service.received if "checkpoints" in item.path]
    assert item.json()["digest"] == weights_digest(tmp_path)
    assert client.counters.invalid == 1


def test_requested_checkpoint_is_polled_after_a_delivery(make: Any, service: FaultyService) -> None:
    service.set_advice({"run": "run-1", "attempt": 1, "revision": 0, "want_weights_at_step": 40})
    client = make()
    assert client.want_weights_at_step is None
    client.log_rollouts(1, rollouts())
    wait_until(lambda: client.want_weights_at_step == 40)


def test_items_are_on_disk_before_they_are_sent(make: Any, service: FaultyService, tmp_path: Path) -> None:
    on_disk: list[list[bytes]] = []
    service.always = lambda received: (
        on_disk.append(spooled_bodies(tmp_path / "spool")) if "/scalars" in received.path else None
    )
    client = make()
    client.log_scalars(1, {"x": 1})
    assert client.flush(60)
    assert service.bodies("/scalars") == [body for body in on_disk[0] if body]
    assert client.counters.spooled == 0
    assert spooled_bodies(tmp_path / "spool") == []


def test_encoding_does_not_import_pandas(tmp_path: Path) -> None:
    program = (
        "import sys, numpy, foreshock\n"
        "client = foreshock.Client('http://127.0.0.1:9', run_key='r', spool_directory=sys.argv[1], exit_seconds=0.0)\n"
        "client.log_rollouts(1, {'prompt_token_ids': [[1]], 'response_token_ids': [[2]], 'group_id': ['g']})\n"
        "client.close(5)\n"
        "assert client.counters.spooled == 2, client.counters\n"
        "assert 'pandas' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_heartbeats_start_again_with_the_next_attempt_in_one_process(make: Any, service: FaultyService) -> None:
    client = make(heartbeat_seconds=0.05)
    for attempt in (1, 2):
        client.start_run(resume_step=attempt, shard=0, shards=1)
        beats = f"/attempts/{attempt}/clients/"
        wait_until(lambda: bool(service.bodies(beats)), 20)  # noqa: B023
        client.finish()
        assert client.flush(60)
