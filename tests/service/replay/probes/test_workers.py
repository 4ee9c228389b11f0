"""Hardware: the workers and the accelerators that are in use, a bounded number of them."""

from __future__ import annotations

import httpx
import pytest

from foreshock_service.replay.probes import workers as service
from tests.service.sending import Sender
from tests.service.working import ask_for_lease, ask_for_probe, run_to_probe


@pytest.fixture
def run(http: httpx.Client) -> Sender:
    """A run with a probe that waits."""
    sender = run_to_probe(http, 1, rollouts=2)
    ask_for_probe(sender, 1).raise_for_status()
    return sender


def test_hardware_lists_workers_and_queued_jobs(http: httpx.Client, run: Sender) -> None:
    ask_for_probe(run, 1, ["torch.float32"], accelerator="H100").raise_for_status()
    ask_for_lease(http, "w1", scorers=["vllm.prefill"]).raise_for_status()
    read = http.get("/v1/hardware").json()
    assert [(each["name"], each["accelerator"], each["device_name"]) for each in read["workers"]] == [
        ("w1", "cpu", "a CPU")
    ]
    found = {each["accelerator"]: each for each in read["accelerators"]}
    assert (found["cpu"]["workers"], found["cpu"]["devices"]) == (1, ["a CPU"])
    assert found["H100"]["queued_jobs"] == 1
    assert found["any"]["running_jobs"] == 1


def test_accelerators_beyond_the_cap_are_counted(
    http: httpx.Client, run: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_MOST_ACCELERATORS", 3)
    for number in range(5):
        ask_for_probe(run, 1, accelerator=f"invented-{number}").raise_for_status()
    ask_for_probe(run, 1, ["torch.float32"], accelerator="invented-4").raise_for_status()
    ask_for_lease(http, "w1", scorers=["vllm.prefill"]).raise_for_status()
    read = http.get("/v1/hardware").json()
    # The one with a live worker, then those with the most jobs.
    names = [each["accelerator"] for each in read["accelerators"]]
    assert len(names) == 3
    assert {"cpu", "invented-4"} <= set(names)
    assert read["accelerators_left_out"] == 7 - 3


def test_devices_beyond_the_cap_are_left_out(http: httpx.Client, run: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_MOST_DEVICES", 2)
    for number in range(4):
        ask_for_lease(http, f"w{number}", device_name=f"device {number}")
    (cpu,) = [each for each in http.get("/v1/hardware").json()["accelerators"] if each["accelerator"] == "cpu"]
    assert cpu["workers"] == 4
    assert cpu["devices"] == ["device 0", "device 1"]
