"""Changes of a run: read from the rollouts whatever order they arrive in, announced by the trainer, paged by step."""

import json
from itertools import permutations
from typing import Any

import httpx
import pytest

from foreshock.api.runs import DifferenceRecord
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts.attributes import BatchAttributes
from foreshock_service.runs.changes import differences
from foreshock_service.runs.shard_decoding import setup_of
from tests.service.sending import Sender, make_batch, start_run


def send(sender: Sender, step: int, device: str | None, shard: int = 0, shards: int = 1) -> None:
    """Upload a shard that was sampled on `device`; None: its attributes name nothing."""
    fingerprint = None if device is None else Fingerprint(engine="vllm", device_name=device, weights_version=step)
    attributes = BatchAttributes(engine_fingerprint=fingerprint)
    batch = make_batch(2, seed=10 * step + shard, attributes=attributes)
    sender.put_shard(step, batch, shard, shards).raise_for_status()


def announce(sender: Sender, step: int, kind: str, **body: Any) -> httpx.Response:
    query = {"attempt": sender.attempt}
    return sender.http.put(f"/v1/runs/{sender.run}/changes/{step}/{kind}", params=query, json=body)


def test_another_gpu_is_a_change_at_its_first_step_in_any_order(http: httpx.Client) -> None:
    devices = ["H100", "H100", "A100"]
    expected = [{"name": "engine.device_name", "before": ["H100"], "after": ["A100"]}]
    for order in permutations(range(3)):
        sender = start_run(http, key=f"order {order}")
        for step in order:
            send(sender, step, devices[step])
        (change,) = sender.items("changes")
        assert (change["step"], change["attempt"], change["kind"], change["rebaseline"]) == (2, 1, "setup", False)
        assert change["differences"] == expected


def test_resume_on_other_hardware_is_a_change_at_the_resume_and_the_old_tail_has_none(sender: Sender) -> None:
    for step, device in enumerate(["H100", "H100", "B200", "H100"]):
        send(sender, step, device)
    assert [each["step"] for each in sender.items("changes")] == [2, 3]
    resumed = sender.new_attempt("second", 2)
    assert sender.items("changes") == []
    send(resumed, 2, "A100")
    (change,) = sender.items("changes")
    assert (change["step"], change["attempt"]) == (2, 2)
    assert change["differences"][0]["before"] == ["H100"]


def test_resume_with_another_fingerprint_of_its_own_is_a_change_without_any_shard(http: httpx.Client) -> None:
    sender = start_run(http)
    path = f"/v1/runs/{sender.run}/attempts"
    for number, flags in enumerate([["--eager"], ["--eager"], []]):
        fingerprint = {"image": f"v{min(number, 1)}", "flags": flags}
        body = {"key": f"start {number}", "resume_step": 10 + number, "fingerprint": fingerprint}
        http.post(path, json=body).raise_for_status()
    first, second = sender.items("changes")
    assert (first["step"], first["attempt"]) == (11, 3)
    assert first["differences"] == [{"name": "attempt.image", "before": ["v0"], "after": ["v1"]}]
    assert second["differences"] == [{"name": "attempt.flags", "before": ['["--eager"]'], "after": ["[]"]}]


def test_steps_that_name_nothing_and_open_steps_are_passed_over(sender: Sender) -> None:
    send(sender, 0, "H100")
    send(sender, 1, None)
    send(sender, 2, "A100", shard=0, shards=2)
    assert sender.items("changes") == []
    send(sender, 2, "H100", shard=1, shards=2)
    (change,) = sender.items("changes")
    assert change["differences"] == [{"name": "engine.device_name", "before": ["H100"], "after": ["A100", "H100"]}]


def test_run_with_another_setup_at_each_step_is_bounded(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 5
    monkeypatch.setattr("foreshock_service.runs.changes.MOST_SETUPS", most)
    sender = start_run(http)
    for step in range(most + 3):
        send(sender, step, f"device {step}")
    found = sender.items("changes", limit=500)
    assert [each["step"] for each in found] == list(range(1, most))


def test_announced_change_is_listed_and_the_newer_words_hold(sender: Sender) -> None:
    first = announce(sender, 5, "length_cap", before=2048, after=4096)
    assert first.status_code == 201
    again = announce(sender, 5, "length_cap", before=2048, after=8192, note="as planned")
    assert again.status_code == 200
    assert sender.items("changes") == [again.json()]
    expected = {"step": 5, "attempt": 1, "kind": "length_cap", "note": "as planned", "before": 2048, "after": 8192}
    assert again.json() == {**expected, "differences": [], "rebaseline": True}


def test_changes_are_paged_within_a_step(sender: Sender) -> None:
    for kind in ("other", "curriculum", "data_mixture"):
        announce(sender, 1, kind).raise_for_status()
    send(sender, 0, "H100")
    send(sender, 1, "A100")
    found = [each["kind"] for each in sender.items("changes", limit=1)]
    assert found == ["curriculum", "data_mixture", "other", "setup"]


ENGINE = Fingerprint(engine="vllm", dtype="bfloat16", device_name="H100", flags={"enforce_eager": "true"})


def test_weights_and_batches_are_no_part_of_an_setup() -> None:
    engine = Fingerprint(engine="vllm", weights_version=3, weights_digest="sha256:1", batch_composition="8 padded")
    found = setup_of(BatchAttributes(engine_fingerprint=engine, trainer_weights_version=4, temperature=1.0))
    assert json.loads(found) == {"engine": {"engine": "vllm"}, "sampling": {"temperature": 1.0}}
    assert found == setup_of(BatchAttributes(engine_fingerprint=Fingerprint(engine="vllm"), temperature=1.0))


def test_loss_and_whose_entropy_are_part_of_a_setup() -> None:
    assert setup_of(BatchAttributes()) == "{}"
    known = {"entropy_policy": "trainer", "clip_low": 0.2, "clip_high": 0.28, "loss_aggregation": "token-mean"}
    assert json.loads(setup_of(BatchAttributes.from_json(json.dumps(known)))) == {"sampling": known}


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
