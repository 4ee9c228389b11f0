"""A real service in a folder of its own, with keys of each scope and a run that has data of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.bad_input.answers import Tally
from benchmarks.running_service import running_service
from foreshock.rollouts import encode_rollouts, encode_scores
from foreshock.statistics_shards import FullRollouts, encode_statistics_shard
from foreshock_service.platform.database.opening import existing_database, prepare_database
from foreshock_service.platform.security import Scope, create_key, new_secret
from tests.service.sending import Sender, make_batch, start_run
from tests.service.working import LeaseHolder, announce_checkpoint, ask_for_probe, noisy, scores_of, take_lease

_MEBIBYTE = 1 << 20
DECODER_CAP = 2048 * _MEBIBYTE
SCOPES = ("ingest", "read", "worker", "admin")
STEP = 1_000_000
"""The step with rollouts, probe and lease. Hostile shards are sent to smaller steps."""

SETTINGS = {
    "FORESHOCK_MAX_BODY_BYTES": str(4 * _MEBIBYTE),
    "FORESHOCK_MAX_JSON_BYTES": str(_MEBIBYTE),
    "FORESHOCK_MAX_TOKENS": "4000000",
    "FORESHOCK_MAX_ROLLOUTS": "4096",
    "FORESHOCK_DECODE_MEMORY_BYTES": str(DECODER_CAP),
    "FORESHOCK_DECODE_TIMEOUT_SECONDS": "30",
    "FORESHOCK_TOKEN_PASS": "numpy",
    "FORESHOCK_SWEEP_INTERVAL_SECONDS": "1",
    "FORESHOCK_LEASE_SECONDS": "36000",
    "FORESHOCK_KEY_REQUESTS_PER_SECOND": "0",
}


@dataclass(frozen=True, slots=True)
class Scene:
    """The service under test."""

    url: str
    folder: Path
    keys: dict[str, str]
    run: str
    sender: Sender
    holder: LeaseHolder
    process: psutil.Process

    @property
    def scorer(self) -> str:
        """The scorer of the leased job."""
        return str(self.holder.lease["job"]["scorers"][0]["scorer"])

    @property
    def sample_id(self) -> str:
        """The sample id of a rollout of the step."""
        return make_batch(6, seed=1).sample_ids[0]

    def headers(self, scope: str) -> dict[str, str]:
        """Return the header with the key of a scope; without a key for `none`."""
        return {"Authorization": f"Bearer {self.keys[scope]}"} if scope in self.keys else {}

    def valid_bodies(self) -> dict[str, bytes]:
        """Return a valid table for each kind of upload."""
        batch = make_batch(6, seed=1)
        rollouts = self.holder.rollouts()
        return {
            "rollouts": encode_rollouts(batch),
            "statistics": encode_statistics_shard(batch, seed="a", full=FullRollouts(2, 1)),
            "scores": encode_scores(scores_of(rollouts, noisy(rollouts, 3))),
        }

    def peaks(self) -> dict[str, int]:
        """Return the peak resident memory so far, in bytes: that of the service, and that of the largest decoder."""
        decoders = [
            _peak(child.pid) for child in self.process.children(recursive=True) if "spawn" in " ".join(_words(child))
        ]
        return {"service": _peak(self.process.pid), "decoder": max(decoders, default=0)}

    def strays(self) -> list[str]:
        """Return the files that are neither the database, nor in the store, nor the log."""
        files = [path.relative_to(self.folder) for path in sorted(self.folder.rglob("*")) if path.is_file()]
        own = ("foreshock-data/tokens/", "foreshock-data/foreshock.db", "serve.log")
        return [str(path) for path in files if not path.as_posix().startswith(own)]


@dataclass(frozen=True, slots=True)
class Request:
    """A hostile request: `path` as routes declare it, its `responses` in the OpenAPI document (None for a page)."""

    path: str
    url: str
    responses: dict[str, Any] | None
    method: str = "GET"
    scope: str = "admin"
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def send_all(scene: Scene, made: Callable[[int], Request], count: int, seed: int) -> Tally:
    """Send the requests that `made` returns for each number, a few at a time; return the tally of the answers."""
    tally = Tally()

    def send(number: int) -> tuple[Request, httpx.Response | httpx.HTTPError]:
        request = made(number)
        headers = scene.headers(request.scope) | request.headers
        try:
            return request, http.request(request.method, request.url, content=request.content, headers=headers)
        except httpx.HTTPError as error:
            return request, error

    with httpx.Client(base_url=scene.url, timeout=120) as http, ThreadPoolExecutor(4) as pool:
        for number, (request, answer) in enumerate(pool.map(send, range(count))):
            sent = f"{request.method} {request.url[:300]}, {len(request.content)} bytes"
            example = f"seed {seed}, number {number}, {sent}"
            if isinstance(answer, httpx.HTTPError):
                tally.note(f"{request.method} {request.path}: no answer", f"{example}: {answer!r}")
                continue
            of_answer = (answer.status_code, answer.headers, answer.content, example)
            if request.responses is None:
                tally.judge_page(request.path, *of_answer)
            else:
                tally.judge((request.method, request.path), request.responses, *of_answer)
    return tally


@contextmanager
def scene(folder: Path, database_url: str | None = None) -> Iterator[Scene]:
    """Start the service in `folder`, which is also its HOME and TMPDIR, and create its keys and its run.

    Its database is a SQLite file in `folder`, or the one at `database_url`.
    """
    surroundings = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
    for path in surroundings.values():
        Path(path).mkdir(parents=True)
    (folder / "foreshock-data").mkdir()
    database = {"FORESHOCK_DATABASE_URL": database_url or f"sqlite:///{folder / 'foreshock-data' / 'foreshock.db'}"}
    keys = _make_keys(*database.values())
    with running_service(folder, **SETTINGS, **surroundings, **database) as url:
        process = next(
            child
            for child in psutil.Process().children()
            if "serve" in _words(child) and child.cwd() == str(folder.resolve())
        )
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {keys['admin']}"}, timeout=120) as http:
            sender = start_run(http, "a run", initial_learning_rate=1e-6)
            sender.put_shard(STEP, make_batch(6, seed=1)).raise_for_status()
            sender.put_scalars(STEP, {"grad_norm": 1.0}).raise_for_status()
            announce_checkpoint(sender, STEP)
            ask_for_probe(sender, STEP).raise_for_status()
            yield Scene(url, folder, keys, sender.run, sender, take_lease(http), process)


def _make_keys(url: str) -> dict[str, str]:
    """Create a key for each scope in the database that the service will open; return the secrets by scope."""
    prepare_database(url)
    keys = {scope: new_secret() for scope in SCOPES}
    with existing_database(url) as database:
        for scope, secret in keys.items():
            database.write(partial(create_key, secret=secret, name=scope, project=None, scopes=[Scope(scope)]))
    return keys


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _peak(pid: int) -> int:
    """Return the peak of the resident memory that the kernel has noted (VmHWM), in bytes; 0 if the process ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)
