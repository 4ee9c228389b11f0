"""Errors of a decoder: which are the upload's, and which the service's own."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from foreshock.errors import StatisticsError
from foreshock.rollouts import DecodeLimits, RolloutBatch, encode_rollouts
from foreshock_service.runs import shard_decoding
from tests.service.sending import make_batch


def test_a_fault_of_the_service_s_own_statistics_is_not_the_upload_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(batch: RolloutBatch) -> NoReturn:
        raise StatisticsError("blobs of different settings")

    monkeypatch.setattr(shard_decoding, "measure_step", fail)
    (tmp_path / "body").write_bytes(encode_rollouts(make_batch(4)))
    # An InvalidRolloutsError would refuse the upload for good, and its client drop it.
    with pytest.raises(StatisticsError):
        shard_decoding.decode_shard(tmp_path / "body", tmp_path / "stored", DecodeLimits(), None)
