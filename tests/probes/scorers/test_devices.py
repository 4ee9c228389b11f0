"""Devices are counted, and more than there are is refused with the numbers."""

import os

import pytest
import torch

from foreshock_probes.scorers.devices import check_devices, cores_of_ranks, device_count
from foreshock_probes.scorers.request import TooFewDevicesError


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU whose process may use the cores 1, 4, 5, 6 and 9."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {9, 4, 5, 6, 1}, raising=False)


@pytest.mark.usefixtures("cores")
def test_each_process_gets_as_many_cores_of_its_own() -> None:
    assert cores_of_ranks(2) == [[1, 4], [5, 6]]
    assert cores_of_ranks(5) == [[1], [4], [5], [6], [9]]


@pytest.mark.usefixtures("cores")
def test_more_processes_than_cores_are_refused() -> None:
    check_devices("tp_size", 5)
    with pytest.raises(TooFewDevicesError, match=r"tp_size=6 needs 6 CPU cores.*this worker has 5"):
        check_devices("tp_size", 6)


def test_devices_are_gpus_if_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_count() == 1
    with pytest.raises(TooFewDevicesError, match=r"needs 2 GPUs.*this worker has 1"):
        check_devices("tensor_parallel_size", 2)
