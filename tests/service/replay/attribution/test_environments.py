"""Attributions of scores from several environments: which of them count, and what the conclusions say of them."""

from typing import Any

import httpx
import numpy as np
import pytest

from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import BatchAttributes, RolloutBatch
from tests.service.replay.attribution.replaying import replay, start
from tests.service.sending import Sender, make_batch
from tests.service.working import noisy

AVX2 = {"cpu_isa": "AVX2", "flags": {"cpu_features": "none", "mkl_kernels": "intel"}}
AMX = {"cpu_isa": "AVX512", "flags": {"cpu_features": "amx_tile avx512 avx512_bf16 vnni", "mkl_kernels": "intel"}}
SAMPLED = Fingerprint(engine="vllm", engine_version="0.32.0", **AVX2)  # type: ignore[arg-type]
TRAINED = Fingerprint(engine="torch", engine_version="2.13.0", **AVX2)  # type: ignore[arg-type]
KNOWN = BatchAttributes(engine_fingerprint=SAMPLED, trainer_fingerprint=TRAINED)


def read(run: Sender, step: int = 1) -> Any:
    return run.get(f"steps/{step}/attribution").raise_for_status().json()


def kinds(found: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(each["kind"], each["link"]) for each in found["conclusions"]]


@pytest.fixture
def batch() -> RolloutBatch:
    return make_batch(40, attributes=KNOWN)


def test_replay_in_another_environment_is_said_and_names_no_cause(http: httpx.Client, batch: RolloutBatch) -> None:
    run = start(http, batch)
    replay(run, {"vllm.prefill": noisy(batch, 1, 0.05)}, batch, AMX)
    found = read(run)
    shares = {link["name"]: link["share"] for link in found["links"]}
    # That of the link with most of the mismatch is said first.
    assert [link for kind, link in kinds(found) if kind == "environment-differs"] == sorted(
        shares, key=lambda link: -shares[link]
    )
    of_the_engine = next(each for each in found["conclusions"] if each["link"] == "vllm.prefill/rollout")
    assert "AVX2 at sampling, AVX-512 with AMX in the replay" in of_the_engine["sentence"]
    assert not any(each["names_cause"] for each in found["conclusions"] if each["link"] == "vllm.prefill/rollout")
    assert found["environments"]["rollout"]["instruction_set"] == "avx2"
    assert found["environments"]["vllm.prefill"]["instruction_set"] == "amx"


@pytest.mark.parametrize("order", [("amx", "avx2"), ("avx2", "amx")])
def test_of_two_environments_that_of_the_run_counts(
    http: httpx.Client, batch: RolloutBatch, order: tuple[str, str]
) -> None:
    run = start(http, batch)
    values = {"avx2": noisy(batch, 1, 0.01), "amx": noisy(batch, 2, 0.05)}
    for name in order:
        replay(run, {"vllm.prefill": values[name]}, batch, {"avx2": AVX2, "amx": AMX}[name], environment=name)
    found = read(run)
    assert found["environments"]["vllm.prefill"]["instruction_set"] == "avx2"
    assert [source["fingerprint"]["cpu_isa"] for source in found["scores"]] == ["AVX2"]
    (link,) = found["environment_links"]
    d = values["amx"].astype(np.float64) - values["avx2"]
    assert link["k3_kl"] == pytest.approx(np.mean(np.expm1(d) - d), rel=1e-9)
    assert (link["first"]["instruction_set"], link["second"]["instruction_set"]) == ("avx2", "amx")
    assert link["share_low"] < link["share"] < link["share_high"]
    assert link["excess"] is None
    assert ("environment-measured", None) in kinds(found)


def test_two_environments_that_are_not_the_runs_give_the_excess(http: httpx.Client) -> None:
    batch = make_batch(40)
    assert batch.rollout_log_probs is not None
    run = start(http, batch)
    first, second = noisy(batch, 1, 0.02), noisy(batch, 2, 0.02)
    replay(run, {"vllm.prefill": first}, batch, AVX2, environment="avx2")
    replay(run, {"vllm.prefill": second}, batch, AMX, environment="amx")
    (link,) = read(run)["environment_links"]
    a, r1, r2 = (each.astype(np.float64) for each in (batch.rollout_log_probs, first, second))
    expected = 0.5 * (np.mean((r1 - a) * (r2 - a)) - 0.5 * np.mean(np.square(r1 - r2)))
    assert link["excess"] == pytest.approx(expected, rel=1e-9)
    assert any("(an assumption)" in each["sentence"] for each in read(run)["conclusions"])
