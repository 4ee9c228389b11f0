"""SIGTERM: long polls end at once, uploads in flight are finished, the process ends with status 0."""

import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

from foreshock.rollouts import encode_rollouts
from tests.service.operation.processes import ServiceProcess, answer_of, service_process
from tests.service.sending import make_batch, start_run

pytestmark = pytest.mark.slow

POLLS = 20


def poll(service: ServiceProcess, path: str, etag: str) -> socket.socket:
    connection = service.connect()
    request = f"GET {path}wait=30 HTTP/1.1\r\nHost: 127.0.0.1\r\nIf-None-Match: {etag}\r\n\r\n"
    connection.sendall(request.encode())
    return connection


def upload_head(run: str, step: int, length: int) -> bytes:
    return (
        f"PUT /v1/runs/{run}/steps/{step}/rollouts/0 HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/vnd.apache.parquet\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def test_sigterm_ends_polls_at_once_and_finishes_uploads(tmp_path: Path) -> None:
    body = encode_rollouts(make_batch())
    with service_process(tmp_path) as service, httpx.Client(base_url=service.url, timeout=60) as http:
        sender = start_run(http)
        paths = (f"/v1/runs/{sender.run}/lr-advice?", f"/v1/runs/{sender.run}/alerts?")
        etags = [http.get(path).headers["ETag"] for path in paths]
        polls = [poll(service, path, etag) for path, etag in zip(paths, etags, strict=True) for _ in range(POLLS)]
        leasing = service.connect()
        wanted = b'{"worker": "w", "accelerator": "cpu", "scorers": ["torch.float32"], "wait": 30}'
        leasing.sendall(
            b"POST /v1/leases HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(wanted), wanted)
        )
        upload = service.connect()
        upload.sendall(upload_head(sender.run, 1, len(body)) + body[: len(body) // 2])
        time.sleep(1)
        begin = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        answers = [answer_of(connection) for connection in polls]
        assert time.monotonic() - begin < 25
        assert [answer.status for answer in answers] == [304] * 2 * POLLS
        leased = answer_of(leasing)
        assert leased.status < 500
        # The rest of the body comes after the signal.
        time.sleep(1)
        upload.sendall(body[len(body) // 2 :])
        stored = answer_of(upload)
        assert stored.status == 201
        assert service.process.wait(timeout=60) == 0
        assert time.monotonic() - begin < 25
    with service_process(tmp_path) as service:
        assert httpx.get(f"{service.url}/v1/runs/{sender.run}/steps/1/buckets", timeout=60).status_code == 200


@pytest.mark.parametrize("second", [None, signal.SIGTERM, signal.SIGINT])
def test_stalled_upload_is_given_up_and_a_second_signal_ends_sooner(
    tmp_path: Path, second: signal.Signals | None
) -> None:
    with service_process(tmp_path, FORESHOCK_SHUTDOWN_SECONDS="2" if second is None else "60") as service:
        with httpx.Client(base_url=service.url, timeout=60) as http:
            run = start_run(http).run
        upload = service.connect()
        upload.sendall(upload_head(run, 1, 1000) + b"PAR1")
        time.sleep(0.5)
        service.process.send_signal(second or signal.SIGTERM)
        if second is not None:
            time.sleep(1.5)
            assert service.process.poll() is None
            service.process.send_signal(second)
        code = service.process.wait(timeout=50)
        assert second is not None or code == 0


def test_poll_of_a_client_that_left_does_not_delay_the_stop(tmp_path: Path) -> None:
    with service_process(tmp_path) as service:
        with httpx.Client(base_url=service.url, timeout=60) as http:
            path = f"/v1/runs/{start_run(http).run}/lr-advice?"
            etag = http.get(path).headers["ETag"]
        poll(service, path, etag).close()
        time.sleep(0.5)
        begin = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(timeout=60) == 0
        assert time.monotonic() - begin < 25


def test_several_processes_end_with_status_0(tmp_path: Path, migrated_postgres: str) -> None:
    settings = {"FORESHOCK_PROCESSES": "2", "FORESHOCK_DATABASE_URL": migrated_postgres}
    with service_process(tmp_path, **settings) as service:
        run = httpx.post(f"{service.url}/v1/runs", json={"key": "stopped"}, timeout=60).json()["id"]
        path = f"/v1/runs/{run}/lr-advice?"
        etag = httpx.get(service.url + path, timeout=60).headers["ETag"]
        polls = [poll(service, path, etag) for _ in range(POLLS)]
        time.sleep(1)
        begin = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        assert [answer.status for answer in map(answer_of, polls)] == [304] * POLLS
        assert service.process.wait(timeout=60) == 0
        assert time.monotonic() - begin < 25
