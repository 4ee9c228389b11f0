"""The precision that a run declares for its trainer is the default of `torch.trainer` in its probes."""

from __future__ import annotations

import httpx
import pytest

from foreshock.fingerprint import Fingerprint
from foreshock_service.replay.probes.environments import (
    declared_precision,
    precision_in_words,
    with_declared_precision,
)
from tests.service.sending import make_batch, start_run
from tests.service.working import announce_checkpoint, ask_for_probe

FLOAT32 = {"master_dtype": "float32", "autocast": None}


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
    assert declared_precision(Fingerprint("torch", **fields)) == options  # type: ignore[arg-type]


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
    assert precision_in_words(declared) == words


def test_requested_precision_is_kept() -> None:
    trainer = Fingerprint("torch", dtype="float32")
    asked = {"torch.trainer": {"autocast": "bfloat16"}}
    assert with_declared_precision(asked, {"torch.trainer"}, trainer) == asked
    batched = with_declared_precision({"torch.trainer": {"batch_size": 8}}, {"torch.trainer"}, trainer)
    assert batched == {"torch.trainer": {**FLOAT32, "batch_size": 8}}
    assert with_declared_precision({}, {"vllm.prefill"}, trainer) == {}
    assert with_declared_precision({}, {"torch.trainer"}, None) == {}


def test_probe_of_a_run_with_a_declared_precision_has_it(http: httpx.Client) -> None:
    run = start_run(http)
    attempt = run.new_attempt("declared", resume_step=1)
    body = {"key": "declared-2", "resume_step": 1, "fingerprint": {"trainer": {"engine": "torch", "dtype": "float32"}}}
    number = http.post(f"/v1/runs/{run.run}/attempts", json=body).raise_for_status().json()["attempt"]
    declared = type(attempt)(http, run.run, number)
    declared.put_shard(1, make_batch(4)).raise_for_status()
    announce_checkpoint(declared, 1)
    probe = ask_for_probe(declared, 1, ["vllm.prefill", "torch.trainer"]).raise_for_status().json()
    assert probe["options"] == {"torch.trainer": FLOAT32}
