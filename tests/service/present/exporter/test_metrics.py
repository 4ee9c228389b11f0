"""/metrics: what it shows, what drops out, what is cut, and that no label grows without bound."""

import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families as parse_text
from sqlalchemy import event

from foreshock_service.maintenance.delete_runs import delete_rows_of_deleted_runs
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.settings import Settings
from foreshock_service.present.exporter import collector
from foreshock_service.present.exporter.collector import scrape as read_samples
from foreshock_service.present.exporter.families import FAMILIES
from tests import monitoring
from tests.paths import PROMETHEUS
from tests.service.sending import Sender, make_batch, make_mixed_batch, start_run
from tests.service.statements import executed
from tests.service.working import announce_checkpoint, ask_for_lease, ask_for_probe, take_lease, work_off

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
BOUNDED = {
    "run", "comparison", "bucket", "link", "accelerator", "rule", "severity", "state", "mode", "version", "public_url",
    "project", "key", "name", "model", "model_kind", "verdict",
}  # fmt: skip


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """At most two exported runs."""
    return settings.model_copy(update={"exporter_max_runs": 2})


@pytest.fixture(scope="session")
def promtool() -> str:
    """Prometheus's own checker."""
    return monitoring.promtool()


def scrape(http: httpx.Client) -> Samples:
    """Every sample by name and labels."""
    text = http.get("/metrics").raise_for_status().text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


def value(samples: Samples, metric: str, /, **labels: str) -> float | None:
    return samples.get((metric, frozenset(labels.items())))


def test_running_run_is_exported_with_its_measures(http: httpx.Client) -> None:
    run = start_run(http, "shown", name="a name", model="a model", model_kind="moe", initial_learning_rate=1e-5)
    for step in (1, 2):
        run.put_shard(step, make_batch(6, seed=step)).raise_for_status()
    samples = scrape(http)
    assert value(samples, "foreshock_step", run=run.run) == 2
    assert value(samples, "foreshock_ingested_rollouts_total", run=run.run) == 12
    last = value(samples, "foreshock_last_ingest_timestamp_seconds", run=run.run)
    assert last is not None
    assert last == pytest.approx(http.get(f"/v1/runs/{run.run}").json()["created_at_us"] / 1e6, abs=60)
    info = {"run": run.run, "project": "default", "key": "shown", "name": "a name", "model": "a model"}
    info |= {"model_kind": "moe"}
    assert value(samples, "foreshock_run_info", **info) == 1

    columns = run.get("measurements", comparison="trainer/rollout", measure="k3_kl").json()["columns"]
    assert value(samples, "foreshock_k3_kl_nats", run=run.run, comparison="trainer/rollout") == columns["k3_kl"][-1]
    lengths = run.get("measurements", comparison="rollout", measure="response_length_mean").json()["columns"]
    assert value(samples, "foreshock_response_length_mean_tokens", run=run.run) == lengths["response_length_mean"][-1]
    assert value(samples, "foreshock_advice_mode", run=run.run, mode="shadow") == 1
    assert value(samples, "foreshock_learning_rate_advised_scale", run=run.run) == 1


def test_ranges_are_compared_with_the_tokens_at_lag_zero(sender: Sender, http: httpx.Client) -> None:
    """Three quarters of the tokens are at lag 8: what the diagnosis judges is what Prometheus compares with a range."""
    for step in range(10, 16):
        sender.put_shard(step, make_mixed_batch(step)).raise_for_status()
    samples, comparison = scrape(http), "trainer/rollout"
    whole = value(samples, "foreshock_k3_kl_nats", run=sender.run, comparison=comparison)
    fresh = value(samples, "foreshock_lag_zero_k3_kl_nats", run=sender.run, comparison=comparison)
    columns = sender.get("measurements", comparison=comparison, measure="k3_kl_lag_0").json()["columns"]
    assert whole is not None
    assert whole > 0.01
    assert fresh == columns["k3_kl_lag_0"][-1] < 1e-3
    assert value(samples, "foreshock_lag_zero_tail_2_ratio", run=sender.run, comparison=comparison) is None
    assert value(samples, "foreshock_diagnosis_verdict", run=sender.run, verdict="healthy") == 1, sender.get(
        "diagnosis"
    ).json()


def test_buckets_add_up_to_the_tokens_of_the_step(sender: Sender, http: httpx.Client) -> None:
    batch = make_batch(8)
    sender.put_shard(1, batch).raise_for_status()
    samples = scrape(http)
    buckets = {labels: each for (name, labels), each in samples.items() if name == "foreshock_bucket_tokens"}
    assert sum(buckets.values()) == batch.num_tokens
    k3 = {labels: each for (name, labels), each in samples.items() if name == "foreshock_bucket_k3_kl_nats"}
    whole = value(samples, "foreshock_k3_kl_nats", run=sender.run, comparison="trainer/rollout")
    total = sum(k3[labels] * count for labels, count in buckets.items() if count) / batch.num_tokens
    assert total == pytest.approx(whole, rel=1e-9)
    # The second scrape reads the tables from memory; a late shard is seen all the same.
    sender.put_shard(2, make_batch(3, seed=9)).raise_for_status()
    later = scrape(http)
    assert sum(each for (name, _), each in later.items() if name == "foreshock_bucket_tokens") != batch.num_tokens


def test_finished_and_deleted_runs_are_not_exported(http: httpx.Client) -> None:
    finished, deleted = start_run(http, "finished"), start_run(http, "deleted")
    for run in (finished, deleted):
        run.put_shard(1, make_batch(2)).raise_for_status()
    assert value(scrape(http), "foreshock_step", run=finished.run) == 1
    http.patch(f"/v1/runs/{finished.run}", json={"state": "finished"}).raise_for_status()
    http.delete(f"/v1/runs/{deleted.run}").raise_for_status()
    samples = scrape(http)
    assert not [labels for _, labels in samples if "run" in dict(labels)]
    assert value(samples, "foreshock_runs", state="finished") == 1
    assert value(samples, "foreshock_exporter_runs_exported") == 0


def test_runs_beyond_the_limit_are_cut_and_counted(http: httpx.Client) -> None:
    runs = [start_run(http, f"run-{number}") for number in range(4)]
    for run in (runs[0], runs[3]):
        run.put_shard(1, make_batch(2)).raise_for_status()
    samples = scrape(http)
    assert value(samples, "foreshock_exporter_runs_exported") == 2
    assert value(samples, "foreshock_exporter_runs_cut") == 2
    # Those with the newest data are kept.
    assert {dict(labels)["run"] for name, labels in samples if name == "foreshock_step"} == {runs[0].run, runs[3].run}


def test_probes_links_and_workers_are_exported(sender: Sender, http: httpx.Client) -> None:
    sender.put_shard(1, make_batch(6)).raise_for_status()
    announce_checkpoint(sender, 1)
    ask_for_probe(sender, 1, ["vllm.prefill", "torch.trainer"]).raise_for_status()
    waiting = scrape(http)
    assert value(waiting, "foreshock_probe_jobs", accelerator="any", state="queued") == 2
    oldest = value(waiting, "foreshock_probe_job_oldest_waiting_seconds", accelerator="any")
    assert oldest is not None
    assert 0 <= oldest < 60
    take_lease(http).fail("retry").raise_for_status()
    assert work_off(http) == 2
    samples = scrape(http)
    assert value(samples, "foreshock_probe_jobs", accelerator="any", state="done") == 2
    assert value(samples, "foreshock_probe_job_failures_total", accelerator="cpu") == 1
    assert value(samples, "foreshock_workers", accelerator="cpu") == 1
    assert value(samples, "foreshock_attributed_step", run=sender.run) == 1
    shares = [each for (name, _), each in samples.items() if name == "foreshock_link_share_ratio"]
    assert len(shares) == 3
    assert sum(shares) == pytest.approx(1, abs=1e-12)
    assert value(samples, "foreshock_k3_kl_nats", run=sender.run, comparison="vllm.prefill/rollout") is not None


def test_counter_of_failures_does_not_fall_when_a_run_is_deleted(http: httpx.Client, app: FastAPI) -> None:
    def failures() -> float | None:
        return value(scrape(http), "foreshock_probe_job_failures_total", accelerator="cpu")

    def fail_in(key: str) -> str:
        run = start_run(http, key)
        run.put_shard(1, make_batch(6)).raise_for_status()
        announce_checkpoint(run, 1)
        ask_for_probe(run, 1).raise_for_status()
        take_lease(http).fail("final").raise_for_status()
        return run.run

    for number in (1, 2):
        run = fail_in(f"deleted-{number}")
        assert failures() == number
        http.delete(f"/v1/runs/{run}").raise_for_status()
        assert failures() == number
        assert not delete_rows_of_deleted_runs(app.state.context, round_seconds=600)
        assert failures() == number


def test_run_without_rollouts_is_exported_by_its_scalars(http: httpx.Client) -> None:
    run = start_run(http, initial_learning_rate=1e-5, scalar_names={"reward": "my/score"})
    for step in (1, 2, 3):
        run.put_scalars(step, {"my/score": step / 4, "reward": 9.0, "k3": 0.01, "response_length/mean": 70.0})
    samples = scrape(http)
    # Step 3 closes when a later one comes.
    assert value(samples, "foreshock_step", run=run.run) == 2
    assert value(samples, "foreshock_reward_mean", run=run.run) == 0.5
    assert value(samples, "foreshock_response_length_mean_tokens", run=run.run) == 70
    assert value(samples, "foreshock_k3_kl_nats", run=run.run, comparison="trainer/rollout") == 0.01
    assert value(samples, "foreshock_lag_zero_k3_kl_nats", run=run.run, comparison="trainer/rollout") == 0.01
    assert value(samples, "foreshock_pareto_k", run=run.run, comparison="trainer/rollout") is None


def test_scale_of_a_run_without_rollouts_is_that_of_its_next_step(http: httpx.Client) -> None:
    run = start_run(http, advice_mode="apply")
    for step in range(100, 141):
        run.put_scalars(step, {"response_length/mean": 100.0 if step < 120 else 300.0}).raise_for_status()
    observed = run.get("lr-advice").json()["observed_step"]
    http.post(f"/v1/runs/{run.run}/advice/decisions", json={"kind": "halve", "reason": "a test"}).raise_for_status()
    for step in (141, 142):
        run.put_scalars(step, {"response_length/mean": 300.0}).raise_for_status()
    assert observed == 139
    assert run.get("lr-advice").json()["advised_scale"] == 0.5
    assert value(scrape(http), "foreshock_learning_rate_advised_scale", run=run.run) == 0.5


def test_each_comparison_is_exported_at_its_newest_step(sender: Sender, http: httpx.Client) -> None:
    for step in (1, 2, 3):
        sender.put_shard(step, make_batch(6, seed=step)).raise_for_status()
    announce_checkpoint(sender, 1)
    ask_for_probe(sender, 1, ["vllm.prefill", "torch.trainer"]).raise_for_status()
    assert work_off(http) == 2
    resumed = sender.new_attempt("resumed", 3)
    resumed.put_shard(3, make_batch(6, seed=9, trainer_log_probs=None)).raise_for_status()

    samples = scrape(http)
    k3 = sender.get("measurements", measure="k3_kl").json()["columns"]
    known = {(step, name): value for step, name, value in zip(k3["step"], k3["comparison"], k3["k3_kl"], strict=True)}
    # Step 3 of the first attempt is superseded.
    for step, name in ((2, "trainer/rollout"), (1, "vllm.prefill/rollout"), (1, "trainer/torch.trainer")):
        assert value(samples, "foreshock_k3_kl_nats", run=sender.run, comparison=name) == known[step, name]
    lengths = resumed.get("measurements", attempt=2, measure="response_length_mean").json()["columns"]
    shown = value(samples, "foreshock_response_length_mean_tokens", run=sender.run)
    assert [shown] == lengths["response_length_mean"]
    assert value(samples, "foreshock_step", run=sender.run) == 3


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_no_scrape_reads_the_measurements_of_every_step(sender: Sender, http: httpx.Client, app: FastAPI) -> None:
    database: Database = app.state.context.database
    sender.put_shard(1, make_batch(6)).raise_for_status()
    announce_checkpoint(sender, 1)
    ask_for_probe(sender, 1).raise_for_status()
    work_off(http)
    asked: list[tuple[str, Any]] = []
    event.listen(database._read_engine, "before_cursor_execute", lambda *call: asked.append((call[2], call[3])))
    scrape(http)
    of_newest = [call for call in asked if "newest_measurements" in call[0]]
    with database.read() as session:
        plans = [
            row.detail
            for query, values in of_newest
            for row in session.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", values)
        ]
    # Each step is looked up by its whole key.
    assert len(plans) >= 4
    newest = [plan for plan in plans if "newest_measurements" in plan]
    assert len(newest) == 2
    assert all("(run_id=?" in plan for plan in newest), plans
    looked_up = [plan for plan in plans if " measurements " in plan or " steps " in plan]
    assert len(looked_up) == 2
    assert all("(run_id=? AND attempt=? AND step=?" in plan for plan in looked_up), plans


def test_non_finite_values_are_counted_and_never_exported(sender: Sender, http: httpx.Client) -> None:
    batch = make_batch(2)
    assert batch.rollout_log_probs is not None
    spoiled = batch.rollout_log_probs.copy()
    spoiled[0] = np.nan
    sender.put_shard(1, make_batch(2, rollout_log_probs=spoiled)).raise_for_status()
    samples = scrape(http)
    assert value(samples, "foreshock_nonfinite_log_probs", run=sender.run) == 1
    assert np.isfinite(list(samples.values())).all()


def test_acknowledged_revision_and_applied_scale_are_exported(http: httpx.Client) -> None:
    run = start_run(http, initial_learning_rate=1e-5)
    run.put_shard(1, make_batch(2)).raise_for_status()
    assert value(scrape(http), "foreshock_advice_acknowledged_revision", run=run.run) is None
    acknowledged = {"revision": 0, "step": 2, "applied_lr": 5e-6}
    http.post(f"/v1/runs/{run.run}/lr-advice/ack", json=acknowledged).raise_for_status()
    samples = scrape(http)
    assert value(samples, "foreshock_advice_acknowledged_revision", run=run.run) == 0
    assert value(samples, "foreshock_learning_rate_applied_scale", run=run.run) == pytest.approx(0.5)


def test_labels_are_bounded_and_names_are_unique_with_the_prefix() -> None:
    assert {label for family in FAMILIES for label in family.labels} <= BOUNDED
    assert all(family.name.startswith("foreshock_") for family in FAMILIES)
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_every_metric_that_a_rule_asks_for_exists() -> None:
    rules = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())
    expressions = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for group in rules["groups"] for rule in group["rules"] if "record" in rule}
    asked = {
        word
        for expression in expressions
        for word in expression.replace("(", " ").replace("{", " ").replace("[", " ").replace(")", " ").split()
        if word.startswith("foreshock_") or ":foreshock_" in word
    }
    assert asked
    assert asked <= {family.sample_name for family in FAMILIES} | recorded


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text"])
def test_both_formats_are_served(http: httpx.Client, accept: str) -> None:
    answer = http.get("/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"].startswith(accept)
    assert answer.text.endswith("# EOF\n") == (accept == "application/openmetrics-text")


def test_promtool_accepts_the_metrics(sender: Sender, http: httpx.Client, promtool: str) -> None:
    sender.put_shard(1, make_batch(4)).raise_for_status()
    text = http.get("/metrics").text
    checked = subprocess.run([promtool, "check", "metrics"], input=text, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_rules_pass_their_unit_tests(promtool: str) -> None:
    done = subprocess.run(
        [promtool, "test", "rules", str(PROMETHEUS / "rules_test.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_unit_test() -> None:
    rules = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())
    tests = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
    fired = {case["alertname"] for test in tests["tests"] for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fired == alerts


def test_the_scrape_configuration_is_valid(promtool: str, tmp_path: Path) -> None:
    shutil.copy(PROMETHEUS / "rules.yml", tmp_path)
    shutil.copy(PROMETHEUS / "prometheus.yml", tmp_path)
    checked = subprocess.run(
        [promtool, "check", "config", "--syntax-only", str(tmp_path / "prometheus.yml")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_queries_do_not_depend_on_the_number_of_runs(http: httpx.Client, app: FastAPI, settings: Settings) -> None:
    context = replace(app.state.context, settings=settings.model_copy(update={"exporter_max_runs": 100}))
    counts = []
    for number in range(2):
        for each in range(1 + 3 * number):
            run = start_run(http, f"run-{number}-{each}")
            run.put_shard(1, make_batch(2)).raise_for_status()
        thread = threading.get_ident()
        # Threads of the background ask too.
        with executed(lambda of=thread: threading.get_ident() == of) as asked:  # type: ignore[misc]
            exported = {metric.name: metric.samples for metric in read_samples(context, "0", None).collect()}
        counts.append(len(asked))
        assert len(exported["foreshock_k3_kl_nats"]) == 1 + 4 * number
    assert counts[0] == counts[1] < 20


def test_accelerators_beyond_the_cap_share_one_label(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "MOST_ACCELERATORS", 1)
    run = start_run(http)
    run.put_shard(1, make_batch(2)).raise_for_status()
    announce_checkpoint(run, 1)
    for number in range(6):
        ask_for_probe(run, 1, accelerator=f"invented-{number}").raise_for_status()
        ask_for_lease(http, f"worker-{number}", accelerator=f"made-up-{number}")
    ask_for_lease(http, "worker-h200", accelerator="h200")
    samples = scrape(http)
    labels = {dict(each)["accelerator"] for _, each in samples if "accelerator" in dict(each)}
    assert labels == {"other", "h200"}
    assert value(samples, "foreshock_probe_jobs", accelerator="other", state="queued") == 6
    assert value(samples, "foreshock_workers", accelerator="other") == 6
    assert value(samples, "foreshock_workers", accelerator="h200") == 1


def test_metrics_show_the_newest_active_step_as_the_api_does(sender: Sender, http: httpx.Client) -> None:
    def is_shown(step: int) -> bool:
        samples, of_run = scrape(http), {"run": sender.run}
        columns = sender.get("measurements", comparison="trainer/rollout", measure="k3_kl").json()["columns"]
        shown = value(samples, "foreshock_k3_kl_nats", **of_run, comparison="trainer/rollout")
        return (value(samples, "foreshock_step", **of_run), shown) == (step, columns["k3_kl"][-1])

    # The first one comes late.
    sender.put_steps((1, 2, 3, 4, 5, 0), 4)
    # An older launch, whose data stayed in a spool, is registered later; its steps are superseded.
    older = {"key": "older", "age_seconds": 3600}
    attempt = http.post(f"/v1/runs/{sender.run}/attempts", json=older).raise_for_status().json()["attempt"]
    for step in range(3):
        Sender(http, sender.run, attempt).put_shard(step, make_batch(4, seed=50 + step)).raise_for_status()
    assert is_shown(5)
    resumed = sender.new_attempt("resumed", 4)
    assert is_shown(3)
    resumed.put_shard(4, make_batch(4, seed=60)).raise_for_status()
    assert is_shown(4)
    sender.new_attempt("from the start", 0)
    assert value(scrape(http), "foreshock_step", run=sender.run) is None
