"""Setups: what is part of one, and in which fields two sets of them differ."""

from __future__ import annotations

import json

from foreshock.api.runs import DifferenceRecord
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts.attributes import BatchAttributes
from foreshock_service.runs.changes import differences
from foreshock_service.runs.shard_decoding import setup_of

ENGINE = Fingerprint(engine="vllm", dtype="bfloat16", device_name="H100", flags={"enforce_eager": "true"})


def test_weights_and_batches_are_no_part_of_an_setup() -> None:
    engine = Fingerprint(engine="vllm", weights_version=3, weights_digest="sha256:1", batch_composition="8 padded")
    found = setup_of(BatchAttributes(engine_fingerprint=engine, trainer_weights_version=4, temperature=1.0))
    assert json.loads(found) == {"engine": {"engine": "vllm"}, "sampling": {"temperature": 1.0}}
    assert found == setup_of(BatchAttributes(engine_fingerprint=Fingerprint(engine="vllm"), temperature=1.0))


def test_attributes_that_name_nothing_give_an_empty_setup() -> None:
    assert setup_of(BatchAttributes()) == "{}"


def test_differences_name_the_field_and_the_entry_of_a_mapping() -> None:
    before = {"engine": {"dtype": "bfloat16", "flags": {"enforce_eager": "true", "seed": "0"}}}
    after = {"engine": {"dtype": "float16", "flags": {"enforce_eager": "false", "seed": "0"}}}
    assert differences([before], [after]) == [
        DifferenceRecord(name="engine.dtype", before=("bfloat16",), after=("float16",)),
        DifferenceRecord(name="engine.flags.enforce_eager", before=("true",), after=("false",)),
    ]


def test_ranks_on_two_kinds_of_hardware_are_compared_as_sets() -> None:
    h100, a100 = ({"engine": {"device_name": name, "dtype": "bfloat16"}} for name in ("H100", "A100"))
    assert differences([h100, a100], [a100, h100]) == []
    assert differences([h100, a100], [h100]) == [
        DifferenceRecord(name="engine.device_name", before=("A100", "H100"), after=("H100",))
    ]


def test_what_one_side_does_not_name_is_no_difference() -> None:
    known = {"engine": {"dtype": "bfloat16"}, "sampling": {"temperature": 1.0}}
    assert differences([known], [{"sampling": {"temperature": 1.0}}]) == []
    assert differences([{}], [known]) == []
