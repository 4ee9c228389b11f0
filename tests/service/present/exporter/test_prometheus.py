"""A real Prometheus scrapes the running service, and its own API gives back what the service measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.monitoring import ask, running_prometheus, wait_for
from tests.paths import PROMETHEUS
from tests.service.sending import make_batch, start_run
from tests.service.server import RunningServer

# The figures are of both databases in `test_metrics.py`.
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)]


@pytest.fixture
def prometheus_url(server: RunningServer, tmp_path: Path) -> Iterator[str]:
    """A Prometheus of this test's own, with the shipped rules, scraping the service each second."""
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(PROMETHEUS / "rules.yml")],
        "scrape_configs": [{"job_name": "foreshock", "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}]}],
    }
    with running_prometheus(configuration, tmp_path) as url:
        yield url


def test_prometheus_reads_what_the_service_measured(http: httpx.Client, prometheus_url: str) -> None:
    run = start_run(http, model="Qwen/Qwen3-8B-Base")
    for step in (1, 2, 3):
        run.put_shard(step, make_batch(8, seed=step)).raise_for_status()
    # It has been scraping since before the first step: what counts is a scrape after the last one.
    (newest,) = wait_for(lambda: ask(prometheus_url, "foreshock_step == 3"))
    assert newest["metric"]["run"] == run.run
    query = f'foreshock_k3_kl_nats{{run="{run.run}", comparison="trainer/rollout"}}'
    (found,) = ask(prometheus_url, query)
    columns = run.get("measurements", comparison="trainer/rollout", measure="k3_kl").json()["columns"]
    assert float(found["value"][1]) == columns["k3_kl"][-1]
    (up,) = ask(prometheus_url, 'up{job="foreshock"}')
    assert up["value"][1] == "1"
    (age,) = ask(prometheus_url, "time() - foreshock_last_ingest_timestamp_seconds")
    assert 0 <= float(age["value"][1]) < 300
    rules = httpx.get(f"{prometheus_url}/api/v1/rules", timeout=60).json()["data"]["groups"]
    assert rules
    wait_for(
        lambda: all(
            rule["health"] == "ok"
            for group in httpx.get(f"{prometheus_url}/api/v1/rules", timeout=60).json()["data"]["groups"]
            for rule in group["rules"]
        )
    )


def test_finished_run_disappears_from_prometheus_and_its_alerts_end(http: httpx.Client, prometheus_url: str) -> None:
    run = start_run(http)
    batch = make_batch(4)
    assert batch.rollout_log_probs is not None
    spoiled = batch.rollout_log_probs.copy()
    spoiled[0] = float("nan")
    run.put_shard(1, make_batch(4, rollout_log_probs=spoiled)).raise_for_status()
    firing = 'ALERTS{alertname="ForeshockNonFiniteLogProbs", alertstate="firing"}'
    (alert,) = wait_for(lambda: ask(prometheus_url, firing))
    assert (alert["metric"]["run"], alert["metric"]["severity"]) == (run.run, "warning")
    http.patch(f"/v1/runs/{run.run}", json={"state": "finished"}).raise_for_status()
    wait_for(lambda: not ask(prometheus_url, "foreshock_step") and ask(prometheus_url, "foreshock_runs"))
    wait_for(lambda: not ask(prometheus_url, firing))
