"""The environment of a job: the run's own if its worker offers it, else the worker's, unless one is required.

The precision that a run declares for its trainer is the default of `torch.trainer` in its probes.
"""

from typing import Any

import httpx
import pytest

from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import BatchAttributes
from foreshock_service.replay.probes import environments
from tests.service.sending import Sender, make_batch, start_run
from tests.service.working import announce_checkpoint, ask_for_lease, ask_for_probe, take_lease

OF_AMD = Fingerprint(engine="vllm", device_name="AMD EPYC", cpu_isa="AVX2")
ON_INTEL = Fingerprint(engine="torch", device_name="Intel(R) Xeon(R)", cpu_isa="AVX2")
FLOAT32 = {"master_dtype": "float32", "autocast": None}
NAMES = ("avx2-amd", "avx2-sse4.2", "avx2")


@pytest.fixture
def run(http: httpx.Client) -> Sender:
    """A run that was sampled on an AMD CPU with AVX2, with one closed step and its checkpoint."""
    sender = start_run(http)
    sender.put_shard(3, make_batch(4, attributes=BatchAttributes(engine_fingerprint=OF_AMD))).raise_for_status()
    announce_checkpoint(sender, 3)
    return sender


def job_of(run: Sender, probe: dict[str, Any]) -> dict[str, Any]:
    (job,) = run.http.get(f"/v1/probes/{probe['id']}").json()["jobs"]
    found: dict[str, Any] = job
    return found


def test_fingerprints_of_a_run_come_from_its_batches_and_else_from_its_attempt() -> None:
    batch = BatchAttributes(engine_fingerprint=OF_AMD, trainer_fingerprint=ON_INTEL)
    assert environments.run_fingerprints(batch, {"engine": "sglang"}) == {"rollout": OF_AMD, "trainer": ON_INTEL}
    named = {"rollout": OF_AMD.to_dict(), "trainer": ON_INTEL.to_dict()}
    assert environments.run_fingerprints(BatchAttributes(), named) == {"rollout": OF_AMD, "trainer": ON_INTEL}
    assert environments.run_fingerprints(BatchAttributes(), OF_AMD.to_dict()) == {"rollout": OF_AMD, "trainer": None}
    assert environments.run_fingerprints(BatchAttributes(), ON_INTEL.to_dict()) == {
        "rollout": None,
        "trainer": ON_INTEL,
    }
    for nothing in ({}, {"gpu": "H100"}, {"rollout": {"engine": 3}}):
        assert environments.run_fingerprints(BatchAttributes(), nothing) == {"rollout": None, "trainer": None}


def test_each_side_wants_its_own_environment_and_the_other_one_if_its_own_is_unknown() -> None:
    both = environments.wanted_environments(None, {"rollout": OF_AMD, "trainer": ON_INTEL})
    assert {name: each.names for name, each in both.items()} == {
        "vllm": NAMES,
        "torch": ("avx2",),
        # A server that runs elsewhere has the environment that it has.
        "http": (),
    }
    one = environments.wanted_environments("run", {"rollout": OF_AMD, "trainer": None})
    assert {one["vllm"], one["torch"]} == {environments.WantedEnvironment(NAMES, is_required=True)}
    assert one["http"].names == ()
    assert {each.names for each in environments.wanted_environments("any", {"rollout": OF_AMD}).values()} == {()}
    assert {each.names for each in environments.wanted_environments(None, {}).values()} == {()}


def test_worker_is_asked_for_the_environment_of_the_run(run: Sender) -> None:
    probe = ask_for_probe(run, 3).raise_for_status().json()
    assert probe["environment"] is None
    assert job_of(run, probe)["environments"] == list(NAMES)
    holder = take_lease(run.http, environments=["avx2", "avx2-sse4.2", "avx512"])
    assert holder.lease["job"]["environment"] == "avx2-sse4.2"
    found = job_of(run, probe)
    assert (found["environment"], found["environment_note"]) == ("avx2-sse4.2", None)


def test_another_environment_is_used_if_the_worker_does_not_offer_that_of_the_run(run: Sender) -> None:
    probe = ask_for_probe(run, 3).raise_for_status().json()
    assert take_lease(run.http, "w1", environments=["avx512"]).lease["job"]["environment"] is None
    assert job_of(run, probe)["environment_note"] == (
        "w1 does not offer the run's own environment (avx2-amd, avx2-sse4.2 or avx2) and was used as it is"
    )


def test_required_environment_waits_for_a_worker_that_offers_it(run: Sender) -> None:
    assert ask_for_lease(run.http, environments=["avx2"]).status_code == 204
    probe = ask_for_probe(run, 3, environment="amx").raise_for_status().json()
    assert ask_for_lease(run.http, environments=["avx2"]).status_code == 204
    assert job_of(run, probe)["reason"] == (
        "waiting for a worker that offers vllm.prefill in the environment amx: no live worker does"
    )
    assert take_lease(run.http, environments=["amx"]).lease["job"]["environment"] == "amx"


def test_requests_for_different_environments_are_different_probes(run: Sender) -> None:
    ids = {ask_for_probe(run, 3, environment=name).json()["id"] for name in (None, "run", "any", "amx", "run")}
    assert len(ids) == 4


def test_environment_of_a_run_without_fingerprints_cannot_be_required(sender: Sender) -> None:
    sender.put_shard(3, make_batch(4)).raise_for_status()
    announce_checkpoint(sender, 3)
    answer = ask_for_probe(sender, 3, environment="run")
    assert answer.status_code == 422
    assert "engine_fingerprint" in answer.json()["detail"]
    assert ask_for_probe(sender, 3).json()["jobs"][0]["environments"] == []


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"dtype": "float32"}, FLOAT32),
        ({"master_dtype": "float32"}, FLOAT32),
        ({"master_dtype": "bfloat16", "dtype": "bfloat16"}, {"master_dtype": "bfloat16", "autocast": None}),
        ({"master_dtype": "float32", "autocast": "bfloat16"}, {"master_dtype": "float32", "autocast": "bfloat16"}),
        ({"master_dtype": "float32", "head_dtype": "float32"}, {**FLOAT32, "head_dtype": "float32"}),
        ({"dtype": "bfloat16"}, {}),
        ({"master_dtype": "float8"}, {}),
        ({}, {}),
    ],
)
def test_fingerprint_declares_the_options(fields: dict[str, str], options: dict[str, str | None]) -> None:
    assert environments.declared_precision(Fingerprint("torch", **fields)) == options  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (FLOAT32, "float32"),
        ({"master_dtype": "float32", "autocast": "bfloat16"}, "bfloat16 autocast over float32 weights"),
        ({"master_dtype": "bfloat16", "autocast": None, "head_dtype": "float32"}, "bfloat16, head in float32"),
        ({}, None),
    ],
)
def test_declared_precision_in_words(declared: dict[str, str | None], words: str | None) -> None:
    assert environments.precision_in_words(declared) == words


def test_requested_precision_is_kept() -> None:
    trainer = Fingerprint("torch", dtype="float32")
    asked = {"torch.trainer": {"autocast": "bfloat16"}}
    assert environments.with_declared_precision(asked, {"torch.trainer"}, trainer) == asked
    batched = environments.with_declared_precision({"torch.trainer": {"batch_size": 8}}, {"torch.trainer"}, trainer)
    assert batched == {"torch.trainer": {**FLOAT32, "batch_size": 8}}
    assert environments.with_declared_precision({}, {"vllm.prefill"}, trainer) == {}
    assert environments.with_declared_precision({}, {"torch.trainer"}, None) == {}


def test_probe_of_a_run_with_a_declared_precision_has_it(sender: Sender, http: httpx.Client) -> None:
    attempt = sender.new_attempt("declared", resume_step=1)
    body = {"key": "declared-2", "resume_step": 1, "fingerprint": {"trainer": {"engine": "torch", "dtype": "float32"}}}
    number = http.post(f"/v1/runs/{sender.run}/attempts", json=body).raise_for_status().json()["attempt"]
    declared = type(attempt)(http, sender.run, number)
    declared.put_shard(1, make_batch(4)).raise_for_status()
    announce_checkpoint(declared, 1)
    probe = ask_for_probe(declared, 1, ["vllm.prefill", "torch.trainer"]).raise_for_status().json()
    assert probe["options"] == {"torch.trainer": FLOAT32}
