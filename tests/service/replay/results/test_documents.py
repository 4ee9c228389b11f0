"""What holds for the document of every kind of probe: who gets its job, whose counts and when, and what is refused."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from foreshock.probe_kinds import DOCTOR, EXACT, LAYERS, PROBE_KINDS, ROUTING
from foreshock.scorers import EXACT_PAIRS
from tests.service.replay.results import test_doctor, test_exact, test_layers, test_routing
from tests.service.sending import Sender, problem_of
from tests.service.working import EVERYTHING, PAIR, STEP, LeaseHolder, ask_for_lease, take_lease

DOCUMENTS: dict[str, Callable[[LeaseHolder], dict[str, Any]]] = {
    DOCTOR.name: test_doctor.found,
    LAYERS.name: lambda _: test_layers.found(*test_layers.DEPARTING),
    ROUTING.name: lambda _: test_routing.comparison(),
    EXACT.name: lambda holder: test_exact.exact_for(holder.rollouts()),
}
# What a request of the kind asks for, and a worker offers, besides scorers and capabilities.
PAIRS = {EXACT.name: {"exact_pairs": [PAIR]}}


@pytest.fixture(params=DOCUMENTS)
def kind(request: pytest.FixtureRequest) -> str:
    """A kind of probe whose result is a document."""
    name: str = request.param
    return name


def test_every_kind_is_tested() -> None:
    assert set(DOCUMENTS) == set(PROBE_KINDS)


def test_document_counts_when_the_job_of_its_own_try_is_complete(http: httpx.Client, run: Sender, kind: str) -> None:
    probes, body = f"/v1/runs/{run.run}/probes", {"step": STEP, "kind": kind, **PAIRS.get(kind, {})}
    capability, address = PROBE_KINDS[kind].capability or EXACT_PAIRS[PAIR].name, f"steps/{STEP}/{kind}"
    probe, again = (http.post(probes, json=body) for _ in range(2))
    assert (probe.status_code, again.status_code, again.json()["id"]) == (201, 200, probe.json()["id"])
    assert ask_for_lease(http, "old", scorers=EVERYTHING).status_code == 204
    assert (
        f"waiting for a worker that offers {capability}"
        in http.get(f"/v1/probes/{probe.json()['id']}").json()["reason"]
    )
    able: dict[str, Any] = PAIRS.get(kind) or {"scorers": (*EVERYTHING, capability)}
    late = take_lease(http, **able)
    document = DOCUMENTS[kind](late)
    assert late.put_document(document).status_code == 204
    assert late.fail("retry").status_code == 204
    assert problem_of(late.put_document(document)) == (409, "lease-lost")
    holder = take_lease(http, "w2", **able)
    # The first try's document is not that of the second.
    assert problem_of(holder.complete()) == (409, "result-incomplete")
    # One that is sent again replaces the first.
    assert [holder.put_document(document).status_code for _ in range(2)] == [204, 204]
    assert run.get(address).status_code == 404
    assert [holder.complete().status_code for _ in range(2)] == [204, 204]
    assert run.get(address).status_code == 200
    # No score is published: these are no log-probs.
    assert run.get(f"steps/{STEP}/attribution").json().get("scores", []) == []


def test_job_of_another_kind_takes_no_document(http: httpx.Client, run: Sender, kind: str) -> None:
    other = {"step": STEP, "scorers": [{"scorer": "vllm.prefill"}]}
    http.post(f"/v1/runs/{run.run}/probes", json=other).raise_for_status()
    holder = take_lease(http)
    assert problem_of(holder.put_document(DOCUMENTS[kind](holder), kind)) == (422, "result-not-asked")
