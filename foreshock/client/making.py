"""Functions that make a delivery in the background: encoding rollouts and reading weights take long."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from foreshock.client import requests
from foreshock.client.deliveries import Delivery, Registration
from foreshock.client.log_once import LogOnce
from foreshock.client.settings import ClientSettings
from foreshock.client.token_pass import NUMPY_PASS, prepare_token_pass
from foreshock.digests import weights_digest
from foreshock.model_kind import model_kind_of_folder
from foreshock.rollouts.batch import RolloutBatch
from foreshock.statistics_shards import FullRollouts

__all__ = ["checkpoint_maker", "shard_maker"]


def shard_maker(
    settings: ClientSettings,
    log: LogOnce,
    registration: Registration,
    step: int,
    rank: tuple[int, int],
    build: Callable[[], RolloutBatch],
) -> Callable[[], Delivery]:
    """Return the function that encodes a shard as `settings.mode` says; `rank` is its number, and theirs in all."""
    shard, shards = rank
    if settings.mode == "tokens":
        return lambda: requests.rollouts(registration, step, shard, shards, build)
    full = FullRollouts(settings.full_rollouts, settings.worst_rollouts, settings.max_step_bytes)

    def make() -> Delivery:
        if not prepare_token_pass():
            log.warning("numpy pass", NUMPY_PASS)
        return requests.statistics(registration, step, shard, shards, build, full)

    return make


def checkpoint_maker(
    registration: Registration,
    step: int,
    announcement: Mapping[str, Any],
    local_folder: str | os.PathLike[str] | None,
) -> Callable[[], Delivery]:
    """Return the function that fills what the announcement lacks from `local_folder`: digest and kind of the model."""

    def make() -> Delivery:
        body = dict(announcement)
        if body["digest"] is None:
            body["digest"] = weights_digest(os.fspath(local_folder or ""))
        if body["model_kind"] is None and local_folder is not None:
            body["model_kind"] = model_kind_of_folder(local_folder)
        return requests.checkpoint(registration, step, body)

    return make
