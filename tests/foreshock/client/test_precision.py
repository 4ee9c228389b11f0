"""The trainer's precision, as `start_run` takes it and the trainer's fingerprint declares it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foreshock.client.precision import dtype_name, with_precision
from foreshock.errors import ConfigurationError
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import BatchAttributes
from foreshock_service.replay.probes.declared_precision import declared_precision


def test_precision_is_what_a_probe_replays_the_trainer_in() -> None:
    attributes = with_precision(BatchAttributes(), {"master_dtype": torch.float32, "autocast": "bf16"})
    assert declared_precision(attributes.trainer_fingerprint) == {"master_dtype": "float32", "autocast": "bfloat16"}


def test_precision_joins_the_trainers_environment() -> None:
    known = Fingerprint("torch", engine_version="2.13", device_name="NVIDIA H200", master_dtype="float32")
    precision = {"master_dtype": "bfloat16", "autocast": None, "head_dtype": "float32"}
    found = with_precision(BatchAttributes(trainer_fingerprint=known), precision).trainer_fingerprint
    assert found == Fingerprint(
        "torch", engine_version="2.13", device_name="NVIDIA H200", master_dtype="bfloat16", head_dtype="float32"
    )


def test_nothing_is_declared_without_precision() -> None:
    assert with_precision(BatchAttributes(top_k=5), {"master_dtype": None, "autocast": None}) == BatchAttributes(
        top_k=5
    )


@pytest.mark.parametrize(
    ("value", "name"),
    [("fp32", "float32"), ("bf16", "bfloat16"), (torch.float16, "float16"), ("no", None), (None, None), (8, None)],
)
def test_names_of_dtypes(value: Any, name: str | None) -> None:
    assert dtype_name(value) == name


def test_unknown_dtype_names_the_argument() -> None:
    with pytest.raises(
        ConfigurationError, match="autocast must be one of float32, bfloat16, float16 or None, got 'fp8'"
    ):
        with_precision(BatchAttributes(), {"autocast": "fp8"})
