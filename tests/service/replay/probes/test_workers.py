"""Hardware: the workers, a bounded number of them."""

from __future__ import annotations

import httpx
import pytest

from foreshock_service.replay.probes import workers as service
from tests.service.working import ask_for_lease


def test_hardware_lists_the_worker_seen_last_first(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("w1", "w2", "w3"):
        ask_for_lease(http, name, scorers=["vllm.prefill"]).raise_for_status()
    monkeypatch.setattr(service, "_MOST_WORKERS", 2)
    read = http.get("/v1/hardware").json()
    assert [(each["name"], each["accelerator"], each["device_name"]) for each in read["workers"]] == [
        ("w3", "cpu", "a CPU"),
        ("w2", "cpu", "a CPU"),
    ]
