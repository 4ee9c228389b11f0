"""Faults of an S3-compatible token store: a real server that is killed, or that refuses."""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from benchmarks.faults.case import CannotRun, Case
from benchmarks.faults.gate import Gate
from benchmarks.faults.workload import make_batch
from foreshock.rollouts import encode_rollouts
from tests.service.object_store import ACCESS_KEY, SECRET_KEY, ObjectStoreServer, RefusingServer


def s3_killed(case: Case, s3: ObjectStoreServer, gate: Gate) -> None:
    """The S3 server (SeaweedFS) is killed with SIGKILL, stays away for three seconds, and is started again; twice."""
    run = case.other_run()
    for number in range(2):
        case.log(3)
        s3.kill()
        answer = case.upload(number, encode_rollouts(make_batch(5, 1, number, 0)), run)
        case.expect(answer is not None and answer.status_code == 503, "a store that is away must be answered with 503")
        live = httpx.get(f"{case.served.url}/livez", timeout=5)
        case.expect(live.is_success, "/livez must not need the store")
        case.log(3)
        time.sleep(3.0)
        s3.start()


def s3_refuses(case: Case, s3: ObjectStoreServer, gate: Gate) -> None:
    """The S3 server answers every request with 403 AccessDenied, then with 503 SlowDown."""
    run = case.other_run()
    for number, (status, code) in enumerate(((403, "AccessDenied"), (503, "SlowDown"))):
        with RefusingServer(status, code) as refusing:
            gate.forward_to(int(refusing.url.rpartition(":")[2]))
            answer = case.upload(number, encode_rollouts(make_batch(5, 1, number, 0)), run)
            case.expect(answer is not None and answer.status_code == 503, f"{code} must be answered with 503")
            case.log(3)
            time.sleep(3.0)
            gate.forward_to(s3.port)
        case.log(3)
        case.flush()


def object_store(folder: Path) -> ObjectStoreServer:
    """Return a running SeaweedFS server; raises CannotRun if the program is missing."""
    own = folder / "s3"
    own.mkdir()
    try:
        return ObjectStoreServer(own)
    except BaseException as error:
        # The tests skip where the program is missing.
        if type(error).__name__ in ("Skipped", "Failed"):
            raise CannotRun(f"skipped: {error}") from None
        raise


def s3_settings(endpoint: str, folder: Path) -> dict[str, str]:
    """Return the settings of a service whose tokens are in the server at `endpoint`."""
    return {
        "FORESHOCK_STORE_URL": "s3://tokens/faults",
        "FORESHOCK_STORE_ENDPOINT": endpoint,
        "FORESHOCK_STORE_ACCESS_KEY_ID": ACCESS_KEY,
        "FORESHOCK_STORE_SECRET_ACCESS_KEY": SECRET_KEY,
        "FORESHOCK_STORE_TIMEOUT_SECONDS": "3",
        "FORESHOCK_STORE_TEMPORARY_FOLDER": str(folder / "temporary"),
    }
