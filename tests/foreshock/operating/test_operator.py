"""Both operators against the real service: the same tests for the operator and its async twin."""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

import foreshock
from foreshock.errors import ConfigurationError, Rejected, RunNotFound, ServiceUnavailable, WrongService
from foreshock.reading.reader import Reader
from foreshock.scorers import default_scorers
from tests.foreshock.batches import random_batch
from tests.foreshock.client.faulty_service import FaultyService, faulty_service
from tests.foreshock.running_service import RunningService
from tests.foreshock.twins import KINDS, assert_twins, opener
from tests.ports import free_port
from tests.service.sending import Sender, make_batch, start_run
from tests.service.working import announce_checkpoint

DIGEST = "sha256:" + "0" * 64


@pytest.fixture(params=KINDS)
def open_operator(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """A function that opens an operator of one kind."""
    with opener(request.param, foreshock.Operator, foreshock.AsyncOperator) as open_one:
        yield open_one


@pytest.fixture
def operator(real_service: RunningService, open_operator: Callable[..., Any]) -> Any:
    """An operator of runs of all projects."""
    return open_operator(real_service.url)


@pytest.fixture
def reader(real_service: RunningService) -> Iterator[Reader]:
    with Reader(real_service.url) as reader:
        yield reader


@pytest.fixture
def run(real_service: RunningService) -> Iterator[Sender]:
    """A new run without rollouts."""
    with httpx.Client(base_url=real_service.url, timeout=60) as http:
        yield start_run(http, f"run-{uuid.uuid4().hex}")


def test_both_operators_have_a_method_for_every_request_with_its_parameters_and_documentation() -> None:
    assert_twins(foreshock.Operator, foreshock.AsyncOperator)


def test_alerts_are_acknowledged_and_resolved(run: Sender, operator: Any, reader: Reader) -> None:
    for step in range(1, 25):
        run.put_shard(step, random_batch(step, rollouts=8, largest=3.0 if step >= 17 else 0.1)).raise_for_status()
    alert = next(reader.alerts(run.run, states=["open"]))
    seen = operator.acknowledge_alert(run.run, alert.id)
    assert (seen.id, seen.state, seen.changed_by) == (alert.id, "acknowledged", "operator")
    assert operator.acknowledge_alert(run.run, alert.id) == seen
    assert operator.resolve_alert(run.run, alert.id).state == "resolved"
    assert [each.id for each in reader.alerts(run.run, states=["resolved"])] == [alert.id]
    with pytest.raises(Rejected, match="cannot be acknowledged") as raised:
        operator.acknowledge_alert(run.run, alert.id)
    assert raised.value.status == 409
    with pytest.raises(Rejected, match="no alert another"):
        operator.resolve_alert(run.run, "another")


def test_decisions_are_in_the_log_with_their_reasons(run: Sender, operator: Any, reader: Reader) -> None:
    run.put_shard(1, make_batch()).raise_for_status()
    halved = operator.decide(run.run, "halve", "the reward fell")
    assert halved.advised_scale == 0.5
    assert operator.decide(run.run, "hold", "a look first").advice.phase == "held"
    with pytest.raises(Rejected, match="409") as raised:
        operator.decide(run.run, "hold", "again")
    assert raised.value.problem["request_id"]
    assert raised.value.problem["detail"]
    assert operator.decide(run.run, "release", "it was noise").advice.phase != "held"
    log = [(each.kind, each.reason, each.author) for each in reader.decisions(run.run)]
    assert log == [
        ("halve", "the reward fell", "operator"),
        ("hold", "a look first", "operator"),
        ("release", "it was noise", "operator"),
    ]


def test_rules_are_set_as_versions(run: Sender, operator: Any, reader: Reader) -> None:
    text = "version = 1\neffective_from_step = 10\n\n[rules.gradient_rise]\nrelative = 5.0\n"
    version = operator.set_rules(run.run, text)
    assert (version.version, version.effective_from_step, version.toml) == (1, 10, text)
    (rule,) = (rule for rule in reader.rules(run.run).rules if rule.name == "gradient_rise")
    assert rule.relative == 5.0
    assert operator.set_rules(run.run, "version = 1\neffective_from_step = 20\n").version == 2
    assert [each.version for each in reader.rules(run.run).versions] in ([1, 2], [2, 1])
    with pytest.raises(Rejected, match="422"):
        operator.set_rules(run.run, "version = 1\nno_such_key = 1\n")


def test_probes_are_requested_cancelled_and_retried(run: Sender, operator: Any, reader: Reader) -> None:
    run.put_shard(7, make_batch()).raise_for_status()
    announce_checkpoint(run, 7)
    announce_checkpoint(run, 3, DIGEST)
    asked: dict[str, Any] = {
        "scorers": ["vllm.prefill", "vllm.prefill@rebatched"],
        "priority": "high",
        "max_rollouts": 3,
        "environment": "any",
        "options": {"vllm.prefill": {"enforce_eager": True}},
    }
    probe = operator.request_probe(run.run, 7, **asked)
    assert (probe.run, probe.step, probe.kind, probe.state, probe.rollouts) == (run.run, 7, "exact", "queued", 3)
    assert [(each.scorer, each.variant) for each in probe.scorers] == [
        ("vllm.prefill", ""),
        ("vllm.prefill", "rebatched"),
    ]
    assert (probe.priority, probe.options) == ("high", {"vllm.prefill": {"enforce_eager": True}})
    assert operator.request_probe(run.run, 7, **asked).id == probe.id
    assert operator.cancel_probe(probe.id).state == "skipped"
    assert operator.retry_probe(probe.id).state == "queued"
    with pytest.raises(Rejected, match="has not ended"):
        operator.retry_probe(probe.id)
    search = operator.examine_step(run.run, 7, max_candidates=2)
    assert {each.id for each in reader.probes(run.run)} == {probe.id, search.id}
    with pytest.raises(Rejected, match="422"):
        operator.request_probe(run.run, 7)
    with pytest.raises(Rejected, match="404"):
        operator.cancel_probe("probe_of_nobody")
    with pytest.raises(TypeError, match="scorers takes several names"):
        operator.request_probe(run.run, 7, scorers="vllm.prefill")


def test_policy_of_probes_is_replaced(run: Sender, operator: Any, reader: Reader) -> None:
    policy = operator.set_probe_policy(
        run.run, every_steps=100, on_alerts=True, rollouts=16, scorers=["torch.float32"], budget_seconds=60.5
    )
    assert (policy.every_steps, policy.on_alerts, policy.rollouts, policy.state) == (100, True, 16, "active")
    assert ([each.scorer for each in policy.scorers], policy.budget_seconds) == (["torch.float32"], 60.5)
    assert reader.probe_policy(run.run) == policy
    off = operator.set_probe_policy(run.run)
    assert (off.every_steps, off.on_alerts, off.state, off.budget_seconds) == (None, False, "off", None)
    assert [each.scorer for each in off.scorers] == list(default_scorers())


def test_fields_of_a_run_are_changed_and_removed(run: Sender, operator: Any, reader: Reader) -> None:
    names = {"reward": "my/score"}
    changed = operator.update_run(
        run.run, state="failed", name="A name", advice_mode="apply", model_kind="moe", scalar_names=names
    )
    assert (changed.state, changed.name, changed.advice_mode) == ("failed", "A name", "apply")
    assert (changed.model_kind, changed.model_kind_source, changed.scalar_names) == ("moe", "declared", names)
    # The diagnosis is judged again in the background.
    assert replace(reader.run(run.run), diagnosis=changed.diagnosis) == changed
    running = operator.update_run(run.run, state="running")
    assert (running.state, running.name, running.model_kind, running.scalar_names) == (
        "running",
        "A name",
        "moe",
        names,
    )
    removed = operator.update_run(run.run, name=None, model_kind=None, scalar_names=None)
    assert (removed.name, removed.model_kind, removed.scalar_names) == (None, None, None)
    assert removed.advice_mode == "apply"


def test_retention_is_set_and_cleared(run: Sender, operator: Any, reader: Reader) -> None:
    kept = operator.set_retention(run.run, last_steps=500, every_steps=10, alert_steps=3)
    assert (kept.source, kept.last_steps, kept.every_steps, kept.alert_steps) == ("run", 500, 10, 3)
    assert reader.retention(run.run) == kept
    everything = operator.set_retention(run.run, last_steps=None)
    assert (everything.source, everything.last_steps, everything.alert_steps) == ("run", None, 2)
    assert operator.clear_retention(run.run) is None
    assert reader.retention(run.run).source == "settings"


def test_changes_and_checkpoints_are_announced(run: Sender, operator: Any, reader: Reader) -> None:
    change = operator.announce_change(run.run, 5, "data_mixture", note="more code", before=0.25, after=0.5)
    assert (change.step, change.kind, change.note, change.before, change.after) == (
        5,
        "data_mixture",
        "more code",
        0.25,
        0.5,
    )
    assert [each for each in reader.changes(run.run) if each.kind != "setup"] == [change]
    checkpoint = operator.announce_checkpoint(
        run.run, 5, root="weights", path="run/5", digest=DIGEST, format="fsdp", model_kind="dense", weights_version=4
    )
    assert (checkpoint.step, checkpoint.path, checkpoint.digest, checkpoint.format) == (5, "run/5", DIGEST, "fsdp")
    assert (checkpoint.attempt, checkpoint.weights_version, checkpoint.expires_at_us) == (1, 4, None)
    assert list(reader.checkpoints(run.run)) == [checkpoint]
    later = run.new_attempt("second", 5)
    assert operator.announce_change(run.run, 5, "other", attempt=later.attempt).attempt == 2
    with pytest.raises(ConfigurationError, match="finite"):
        operator.announce_change(run.run, 5, "other", before=float("nan"))


def test_rollouts_are_deleted_by_sample_and_group(run: Sender, operator: Any, reader: Reader) -> None:
    batch = make_batch(6)
    run.put_shard(1, batch).raise_for_status()
    deletion = operator.delete_rollouts(run.run, sample_ids=[batch.sample_ids[5]], group_ids=["group-0"])
    assert (deletion.sample_ids, deletion.group_ids) == (1, 1)
    assert [each.id for each in reader.deletions(run.run)] == [deletion.id]
    with pytest.raises(TypeError, match="group_ids takes several names"):
        operator.delete_rollouts(run.run, group_ids="group-0")


def test_deleted_run_is_gone(run: Sender, operator: Any, reader: Reader) -> None:
    assert operator.delete_run(run.run) is None
    for call in (operator.delete_run, operator.clear_retention, reader.run):
        with pytest.raises(Rejected, match="410"):
            call(run.run)
    with pytest.raises(RunNotFound):
        operator.delete_run("no-such-run")


def test_run_is_addressed_by_its_key_in_the_project(real_service: RunningService, open_operator: Any) -> None:
    key = f"of-two/{uuid.uuid4().hex}"
    with httpx.Client(base_url=real_service.url, timeout=60) as http:
        first, second = (start_run(http, key, project=project) for project in ("one", "two"))
    changed = open_operator(real_service.url, "two").update_run(key, name="of two")
    assert (changed.id, changed.project) == (second.run, "two")
    with pytest.raises(Rejected, match="409"):
        open_operator(real_service.url).update_run(key, name="of which?")
    assert open_operator(real_service.url, "one").update_run(key).id == first.run


def test_operator_has_a_reader_of_its_project(real_service: RunningService) -> None:
    with foreshock.Operator(real_service.url, "one", api_key="k", retry_seconds=3) as operator:
        reader = operator.reader()
    assert isinstance(reader, foreshock.Reader)
    assert reader.settings == operator.settings
    reader.close()


def test_call_that_may_be_repeated_is_retried_while_the_service_is_busy(open_operator: Callable[..., Any]) -> None:
    with faulty_service(faults=deque([503, 429, "reset"])) as service:
        with pytest.raises(WrongService, match="RunRecord lacks"):
            open_operator(service.url, retry_seconds=30).update_run("my-run", name="x")
        assert [item.path for item in service.received] == ["/v1/runs/my-run"]
        assert service.requests == 4


@pytest.mark.parametrize("fault", [503, "reset", "half"])
def test_decision_that_may_have_been_received_is_not_sent_again(open_operator: Callable[..., Any], fault: Any) -> None:
    with faulty_service(faults=deque([fault])) as service:
        with pytest.raises(ServiceUnavailable):
            open_operator(service.url, retry_seconds=30).decide("my-run", "halve", "once")
        assert service.requests == 1


def test_decision_that_was_not_received_is_sent_again(open_operator: Callable[..., Any]) -> None:
    service = FaultyService(port=free_port(), faults=deque([429]))
    starting = threading.Timer(0.5, service.start)
    starting.start()
    try:
        # What the server answers is no advice.
        with pytest.raises(WrongService):
            open_operator(service.url, retry_seconds=30).decide("my-run", "halve", "once")
        starting.join()
        (decided,) = service.received
        assert decided.json() == {"kind": "halve", "reason": "once"}
    finally:
        starting.join()
        service.stop()
