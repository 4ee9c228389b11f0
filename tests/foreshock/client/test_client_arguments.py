"""Tests of the client's arguments: invalid ones are counted and logged once, or raise; None is a missing value."""

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreshock.client import Client
from foreshock.errors import ConfigurationError, InvalidRolloutsError
from foreshock.rollouts import decode_rollouts
from tests.foreshock.client.faulty_service import FaultyService
from tests.foreshock.client.trainer import rollouts


def test_invalid_arguments_are_logged_once(make: Any, service: FaultyService, caplog: pytest.LogCaptureFixture) -> None:
    client = make()
    wrong = {**rollouts(), "rollout_log_probs": np.zeros(1)}
    client.log_rollouts(1, wrong)
    client.log_rollouts(2, wrong)
    client.log_rollouts(-1, rollouts())
    client.log_rollouts(1, rollouts(), shard=2, shards=2)
    client.log_rollouts(1, None)
    client.log_scalars("soon", {"x": 1})
    client.log_scalars(1, {"x": "high"})
    client.log_scalars(1, 5)
    client.log_checkpoint(1, root="r", path="p")
    client.start_run(initial_learning_rate=float("nan"))
    client.log_scalars(3, {"x": 1})
    assert client.flush(60).undelivered == 0
    counters = client.counters.snapshot()
    assert counters.invalid + counters.internal_errors == 10
    assert service.bodies("rollouts") == []
    assert len(service.bodies("/steps/3/scalars")) == 1
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == len(set(warnings))


def test_strict_client_raises_for_invalid_arguments(make: Any) -> None:
    client = make(strict=True)
    with pytest.raises(ConfigurationError, match="0 <= shard < shards, got shard=3, shards=2"):
        client.log_rollouts(1, rollouts(), shard=3, shards=2)
    with pytest.raises(InvalidRolloutsError, match="unknown column; columns: sample_id, "):
        client.log_rollouts(1, {**rollouts(), "logprobs": [1]})
    with pytest.raises(ConfigurationError, match="one number"):
        client.log_scalars(1, {"x": [1, 2]})
    for call in (partial(client.log_rollouts, 1, rollouts()), client.start_run):
        with pytest.raises(ConfigurationError, match=r"must be a BatchAttributes, got dict; from a mapping"):
            call(attributes={"temperature": 1.0})
    for digest in ("sha256:12", "abc", "sha256:" + "A" * 64):
        with pytest.raises(ConfigurationError, match="digest must be sha256: and 64 hexadecimal digits"):
            client.log_checkpoint(1, root="r", path="p", digest=digest)


def test_none_is_a_missing_value_of_scalars_and_rewards(make: Any, service: FaultyService) -> None:
    client = make(strict=True)
    client.log_scalars(1, {"x": None, "y": 2.0})
    client.log_rollouts(1, {**rollouts(), "reward": [None, 1.0, 1.0]})
    assert client.flush(30)
    (body,) = service.bodies("/steps/1/scalars")
    assert json.loads(body)["values"] == {"x": None, "y": 2.0}
    reward = decode_rollouts(service.bodies("rollouts")[0]).reward
    assert reward is not None
    assert np.isnan(reward[0])
    assert (reward[1:] == 1.0).all()


def test_invalid_settings_raise_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"must look like http://127.0.0.1:8765, got 'localhost:8765'"):
        Client("localhost:8765", spool_directory=tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"unknown setting 'max_queue' of Client; settings: max_queue_items, max_queue_bytes, "
    ):
        Client(spool_directory=tmp_path, max_queue=3)
