"""A real service under real runs, watched by a real Prometheus and Alertmanager: what dashboards and alerts show.

The service is on PostgreSQL. It gets steps of the recorded run as its trainer sent them and a run of a mixture of
experts; a real worker replays a checkpoint.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.running_service import forked_service
from dashboards.generate import dashboards
from examples.tiny_rl.record import RunRecord
from examples.tiny_rl.run_log import WEIGHTS_ROOT, start_run
from foreshock import AdviceFeed, Client
from foreshock.rollouts import RolloutBatch
from foreshock_probes.console import WorkerConsole
from foreshock_probes.settings import WorkerSettings
from foreshock_probes.worker import Worker
from tests.monitoring import running_alertmanager, running_prometheus
from tests.paths import PROMETHEUS, REPOSITORY
from tests.service import sending
from tests.service.postgres import start_postgres
from tests.service.sending import make_batch
from tests.service.watch.notifications.receiver import Receiver
from tests.waiting import wait_until

RECORD = RunRecord(REPOSITORY / "examples" / "tiny_rl" / "recorded")
STEPS = (1, 2, 3)
READER_PASSWORD = "it's a secret"
READER_SQL = REPOSITORY / "dashboards" / "grafana" / "reader.sql"
TORCH = ("torch.trainer", "torch.bfloat16", "torch.float32")


@dataclass(frozen=True, slots=True)
class Monitored:
    """The addresses of what runs, and the recorded run's id."""

    service: httpx.Client
    prometheus: str
    database: str
    receiver: Receiver
    run: str


def queries(key: str) -> list[tuple[str, str]]:
    """Return (where, query) of every panel and variable whose query has this key."""
    return [
        (f"{dashboard.uid}: {panel['title']}", target[key])
        for dashboard in dashboards()
        for panel in dashboard.render()["panels"]
        for target in panel.get("targets", [])
        if key in target
    ]


def replay_steps(client: Client) -> str:
    """Log some steps of the recorded run as its trainer did; return the run's id."""
    manifest = RECORD.manifest()
    scalars = RECORD.scalars()
    checkpoint, other = manifest.checkpoints[:2]
    start_run(client, manifest.run, manifest.attempts[-1], manifest.fingerprints())
    with AdviceFeed(client) as feed:
        client.log_checkpoint(1, root=WEIGHTS_ROOT, path=checkpoint.path, digest=checkpoint.digest, weights_version=1)
        # Announced with the digest of another: no worker may use it.
        client.log_checkpoint(2, root=WEIGHTS_ROOT, path=other.path, digest=checkpoint.digest, weights_version=2)
        for step in STEPS:
            client.log_scalars(step, scalars[step])
            client.log_rollouts(step, RECORD.rollouts(step))
            feed.acknowledge(step, scalars[step]["lr"])
        assert client.flush(60.0).undelivered == 0
    assert client.run_id is not None
    return client.run_id


def probe(service: httpx.Client, url: str, run: str) -> None:
    """Let a real worker replay the checkpoint; one probe stays queued, for hardware that is not there, one fails."""

    def request(**fields: Any) -> str:
        scorers = [{"scorer": name} for name in ("torch.trainer", "torch.float32")]
        body = {"step": 1, "scorers": scorers, "options": RECORD.manifest().scorer_options, **fields}
        return str(service.post(f"/v1/runs/{run}/probes", json=body).raise_for_status().json()["id"])

    request(accelerator="our-own-machine")
    probes = [request(accelerator="cpu"), request(accelerator="cpu", step=2)]
    settings = WorkerSettings(
        url=url, weights_roots={WEIGHTS_ROOT: RECORD.folder}, accelerator="cpu", lease_wait_seconds=1.0
    )
    console = StringIO()
    for _ in probes:
        Worker(settings, WorkerConsole(console), scorers=TORCH).run(once=True, until_idle_seconds=30.0)
    states = [service.get(f"/v1/probes/{name}").json()["state"] for name in probes]
    assert states[0] == "done", console.getvalue()
    assert states[1] in ("skipped", "failed"), console.getvalue()
    wait_until(lambda: service.get(f"/v1/runs/{run}/steps/1/attribution").status_code != 503)


def send_step(service: httpx.Client, key: str, batch: RolloutBatch, **fields: Any) -> str:
    sender = sending.start_run(service, key, **fields)
    sender.put_shard(1, batch).raise_for_status()
    return sender.run


def broken_batch() -> RolloutBatch:
    batch = make_batch(4)
    assert batch.rollout_log_probs is not None
    spoiled = batch.rollout_log_probs.copy()
    spoiled[0] = float("nan")
    return make_batch(4, rollout_log_probs=spoiled)


def send_broken_run(service: httpx.Client) -> str:
    """Send a step with a log-prob that is no number, which an alert reports; return the run's id."""
    return send_step(service, "broken", broken_batch())


def alertmanager_configuration(receiver: Receiver, *, hurried: bool) -> str:
    """Return the shipped example with the address of the receiver; `hurried`: without its waits."""
    document = yaml.safe_load((PROMETHEUS / "alertmanager.yml").read_text())
    (webhook,) = document["receivers"][0]["webhook_configs"]
    webhook["url"] = f"{receiver.url}/alerts"
    if hurried:
        document["route"] |= {"group_wait": "1s", "group_interval": "1s"}
    return yaml.safe_dump(document)


def prometheus_configuration(service: str, alertmanager: str, *, hurried: bool) -> dict[str, Any]:
    """Return the shipped configuration with the addresses of what runs; `hurried`: it scrapes each second."""
    document: dict[str, Any] = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    document["rule_files"] = [str(PROMETHEUS / name) for name in document["rule_files"]]
    document["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [alertmanager.removeprefix("http://")]
    (job,) = document["scrape_configs"]
    job["static_configs"][0]["targets"] = [service.removeprefix("http://")]
    del job["authorization"]  # A service on loopback needs no key.
    if hurried:
        document["global"] |= {"scrape_interval": "1s", "evaluation_interval": "1s"}
        job["scrape_timeout"] = "1s"
    return document


@contextmanager
def monitored_service(folder: Path, *, hurried: bool) -> Iterator[Monitored]:
    """Run all of it; `hurried` shortens the waits of the shipped configurations to a second."""
    with ExitStack() as stack:
        cluster = start_postgres()
        stack.callback(cluster.stop)
        database = cluster.new_database()
        receiver = Receiver()
        stack.callback(receiver.close)
        (folder / "service").mkdir()
        environment = {"FORESHOCK_DATABASE_URL": database, "FORESHOCK_SWEEP_INTERVAL_SECONDS": "0.5",
                       "FORESHOCK_TOKEN_PASS": "numpy", "FORESHOCK_DECODE_PROCESSES": "1"}  # fmt: skip
        url = stack.enter_context(forked_service(folder / "service", **environment))
        service = stack.enter_context(httpx.Client(base_url=url, timeout=60))
        alertmanager = stack.enter_context(
            running_alertmanager(alertmanager_configuration(receiver, hurried=hurried), folder)
        )
        configuration = prometheus_configuration(url, alertmanager, hurried=hurried)
        prometheus = stack.enter_context(running_prometheus(configuration, folder))
        # It stays open: a client that is closed marks its run as finished, and finished runs are not exported.
        client = stack.enter_context(
            Client(url, run_key="recorded", attempt_key="first", spool_directory=folder / "spool", strict=True)
        )
        run = replay_steps(client)
        send_step(service, "experts", make_batch(40), model_kind="moe")
        probe(service, url, run)
        yield Monitored(service, prometheus, database, receiver, run)


def make_reader(database: str) -> None:
    """Give the database the role that Grafana has, with the password `READER_PASSWORD`."""
    psql = shutil.which("psql")
    assert psql is not None, "psql comes with PostgreSQL"
    subprocess.run(
        [psql, "--no-psqlrc", "--set=ON_ERROR_STOP=1", f"--file={READER_SQL}", database],
        env={"READER_PASSWORD": READER_PASSWORD, "PATH": os.environ["PATH"]}, check=True, capture_output=True,
    )  # fmt: skip


def firing(monitored: Monitored, run: str) -> list[dict[str, Any]]:
    """Return what the webhook got about the log-probs of a run that are no numbers, oldest first."""
    return [
        alert
        for body in monitored.receiver.bodies
        for alert in body["alerts"]
        if alert["labels"].get("run") == run and alert["labels"]["alertname"] == "ForeshockNonFiniteLogProbs"
    ]
