"""Real TRL trainers with real vLLM, connected by `ForeshockCallback` to a real service."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.learning_rate.length_decay import warmed
from tests.foreshock.integrations.logged_attributes import declared, logged_attributes
from tests.foreshock.integrations.logged_runs import LoggedRun, run_named
from tests.foreshock.integrations.operators import CORRECTION, SMALL_RATE
from tests.foreshock.integrations.preloaded import Preloaded, preloaded
from tests.foreshock.running_service import RunningService
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

STEPS = 4
HALVED_AT = 2


@dataclass(frozen=True, slots=True)
class Run(LoggedRun):
    """A run that TRL trained: its log, one entry per step, and what it wrote."""

    log: list[dict[str, Any]]
    output: str


@pytest.fixture(scope="module")
def libraries() -> Iterator[Preloaded]:
    """A process that has imported TRL and vLLM, which takes 10 s of CPU time."""
    with preloaded(
        "examples.trl.train", "trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer", "vllm.entrypoints.llm"
    ) as process:
        yield process


@pytest.fixture(scope="module")
def train(
    shared_service: RunningService, http: httpx.Client, tmp_path_factory: pytest.TempPathFactory, libraries: Preloaded
) -> Callable[..., Run]:
    """Train in a process of its own: `train(algorithm, engine, scenario)`."""

    def run(algorithm: str, engine: str, scenario: str) -> Run:
        folder = tmp_path_factory.mktemp("trl")
        key = f"{algorithm}-{engine}-{scenario}"
        settings = {"FORESHOCK_URL": shared_service.url, "FORESHOCK_RUN_KEY": key,
                    "FORESHOCK_SPOOL_DIRECTORY": str(folder / "spool"),
                    "MASTER_PORT": str(free_port())}  # fmt: skip
        arguments = [str(folder), algorithm, engine, scenario, str(STEPS), str(HALVED_AT)]
        (history,), output = libraries.run(folder, "tests.foreshock.integrations.trl_runs", arguments, [settings])
        return Run(http, run_named(http, key), [entry for entry in history if "reward" in entry], output)

    return run


@pytest.fixture(scope="module")
def grpo(train: Callable[..., Run]) -> Run:
    """GRPO with vLLM under advice in mode apply; truncated completions are masked in its loss."""
    return train("grpo", "vllm", "apply")


def test_mismatch_equals_trls_own(grpo: Run) -> None:
    measured = grpo.measures(TRAINER_ROLLOUT, "mean_abs_d", "max_abs_d", "k3_kl")
    for step, entry in enumerate(grpo.log):
        assert measured["max_abs_d"][step] == pytest.approx(entry["sampling/sampling_logp_difference/max"], abs=1e-6)
        assert measured["mean_abs_d"][step] == pytest.approx(entry["sampling/sampling_logp_difference/mean"], abs=1e-6)
        assert 0 < measured["k3_kl"][step] < 1e-3


def test_masked_truncated_completions_are_logged(grpo: Run) -> None:
    """TRL's mask hides them from its loss; they were sampled all the same."""
    steps = grpo.measures(STEP_ROW, "num_rollouts", "response_length_mean", "truncated_fraction", "reward_mean")
    assert steps["num_rollouts"] == [8] * STEPS
    assert max(steps["truncated_fraction"]) > 0
    for step, entry in enumerate(grpo.log):
        assert steps["response_length_mean"][step] == pytest.approx(entry["completions/mean_length"])
        assert steps["truncated_fraction"][step] == pytest.approx(entry["completions/clipped_ratio"])
        assert steps["reward_mean"][step] == pytest.approx(entry["reward"], abs=1e-6)


def test_advice_reaches_the_optimizer_and_trls_log(grpo: Run) -> None:
    rates = [entry["learning_rate"] for entry in grpo.log]
    assert rates[:HALVED_AT] == pytest.approx([warmed(SMALL_RATE, step, 0.0) for step in range(1, HALVED_AT + 1)])
    assert rates[-1] == pytest.approx(SMALL_RATE / 2)
    planned = grpo.get("/scalars?name=planned_last_step")["columns"]["value"]
    assert planned == [float(len(grpo.log))] * len(grpo.log)


def test_correction_is_set_in_mid_run_and_acknowledged(grpo: Run) -> None:
    """An operator sets token TIS at 1; before, TRL masks sequences above 3, its default."""
    largest = [entry["sampling/importance_sampling_ratio/max"] for entry in grpo.log]
    assert max(largest[:HALVED_AT]) > 1.0
    assert max(largest[HALVED_AT:]) == 1.0
    applied = grpo.get("/advice")["correction"]["applied"]
    assert (applied["done"], applied["refused"], applied["step"]) == (CORRECTION, None, HALVED_AT + 1)


def test_each_update_is_measured_on_the_rollouts_of_its_step(grpo: Run) -> None:
    moved = grpo.get("/scalars?name=update_k3")["columns"]
    assert moved["step"] == list(range(1, STEPS + 1))
    assert all(0 < value < 1 for value in moved["value"])


def test_lag_is_0_for_an_engine_that_gets_the_weights_before_it_samples(grpo: Run) -> None:
    assert grpo.measures(STEP_ROW, "lag_mean")["lag_mean"] == [0.0] * STEPS


def test_checkpoints_are_announced_for_the_step_that_they_sample(grpo: Run) -> None:
    steps = [each["step"] for each in grpo.get("/checkpoints")["items"]]
    assert steps == [3, 5]


def test_vllm_holds_the_trainers_weights_at_each_step(grpo: Run) -> None:
    items = grpo.get("/weights")["items"]
    assert [(each["step"], each["engine"]) for each in items] == [(step, "0") for step in range(1, STEPS + 1)]
    for each in items:
        assert each["verdict"]["compared"] > 10
        assert all(wrong["name"] == "lm_head.weight" for wrong in each["verdict"]["wrong"]), each["sentence"]


def test_run_describes_model_trainer_and_engine(grpo: Run) -> None:
    run = grpo.get()
    assert run["state"] == "finished"
    assert run["model_kind"] == "dense"
    assert run["trainer"].endswith("GRPOTrainer")
    assert run["engine"].startswith("vllm")
    assert run["length_cap"] == 24


def test_environment_and_precision_of_both_sides_are_logged(grpo: Run, shared_service: RunningService) -> None:
    attributes = logged_attributes(shared_service, grpo.id)
    trainer, engine = attributes.trainer_fingerprint, attributes.engine_fingerprint
    assert trainer is not None
    assert engine is not None
    assert (trainer.engine, trainer.master_dtype, trainer.autocast) == ("torch", "float32", None)
    assert (engine.engine, engine.dtype) == ("vllm", "bfloat16")
    for fingerprint in (trainer, engine):
        assert fingerprint.device_name
        assert fingerprint.cpu_isa
        assert fingerprint.engine_version
        assert fingerprint.library_versions["torch"]


def test_configuration_is_declared(grpo: Run, shared_service: RunningService) -> None:
    assert declared(shared_service, grpo.id) == {
        "temperature": 0.9, "top_p": 1.0, "top_k": -1, "logprobs_mode": "processed_logprobs", "length_cap": 24,
        "trainer_policy": "recomputed_old", "clip_low": 0.2, "clip_high": 0.2, "loss_aggregation": "dapo",
    }  # fmt: skip


def test_rloo_has_log_probs_of_engine_and_trainer(train: Callable[..., Run]) -> None:
    run = train("rloo", "vllm", "shadow")
    k3 = run.measures(TRAINER_ROLLOUT, "k3_kl")["k3_kl"]
    assert len(k3) == STEPS
    assert all(0 < value < 1e-3 for value in k3)


def test_generation_without_vllm_warns_and_logs_the_rest(train: Callable[..., Run]) -> None:
    run = train("grpo", "transformers", "shadow")
    assert run.output.count("set use_vllm=True") == 1
    assert run.measures(STEP_ROW, "num_rollouts")["num_rollouts"] == [8] * STEPS
    assert run.measures(TRAINER_ROLLOUT, "k3_kl")["k3_kl"] == []
