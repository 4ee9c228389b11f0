"""verl's own `RayPPOTrainer.fit`, observed through its plugin mechanism, logged to a real service."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import httpx
import pytest

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.integrations import verl
from foreshock.integrations.verl_columns import precision_of
from foreshock.learning_rate.length_decay import warmed
from foreshock.rollouts import decode_rollouts
from tests.foreshock.integrations.logged_attributes import declared, logged_attributes
from tests.foreshock.integrations.logged_runs import LoggedRun, run_named
from tests.foreshock.integrations.operators import CORRECTION
from tests.foreshock.integrations.preloaded import Preloaded, preloaded
from tests.foreshock.running_service import RunningService

pytestmark = pytest.mark.slow

STEPS = 3
ROLLOUTS = 16
RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Run(LoggedRun):
    """A run of verl: the metrics that it logged by step, the rates of its optimizer, its output."""

    metrics: list[dict[str, float]]
    rates: list[float]
    output: str


@pytest.fixture(scope="module")
def libraries() -> Iterator[Preloaded]:
    """A process that has imported what verl imports; verl itself finds its plugin when a run imports it."""
    with preloaded("torch.distributed", "transformers", "tensordict", "ray", "omegaconf", "datasets") as process:
        yield process


@pytest.fixture(scope="module")
def train(
    shared_service: RunningService, http: httpx.Client, tmp_path_factory: pytest.TempPathFactory, libraries: Preloaded
) -> Callable[..., Run]:
    """Train in a process of its own; nothing but environment variables connects it."""

    def run(scenario: str, module: str = "verl_runs", **settings: str) -> Run:
        key = settings.get("FORESHOCK_RUN_KEY") or "-".join([module, scenario, *settings.values()])
        settings = {"FORESHOCK_URL": shared_service.url, "FORESHOCK_RUN_KEY": key,
                    "FORESHOCK_SPOOL_DIRECTORY": str(tmp_path_factory.mktemp("spool")), **settings}  # fmt: skip
        folder = tmp_path_factory.mktemp("verl")
        path = f"tests.foreshock.integrations.{module}"
        (log,), output = libraries.run(folder, path, [scenario, str(STEPS)], [settings])
        return Run(http, run_named(http, key), log["metrics"], log["rates"], output)

    return run


@pytest.fixture(scope="module")
def decoupled(train: Callable[..., Run]) -> Run:
    """A run that recomputes the trainer's log-probs."""
    return train("decoupled")


def test_mismatch_equals_verls_own(decoupled: Run) -> None:
    names = ("rollout_probs_diff_mean", "rollout_probs_diff_max", "rollout_actor_probs_pearson_corr")
    measured = decoupled.measures(TRAINER_ROLLOUT, *names)
    for step, metrics in enumerate(decoupled.metrics):
        for name in names:
            assert measured[name][step] == pytest.approx(metrics[f"training/{name}"], abs=1e-6), name


def test_lengths_rewards_and_entropy_equal_verls_own(decoupled: Run) -> None:
    measured = decoupled.measures(STEP_ROW, "num_rollouts", "response_length_mean", "reward_mean", "entropy_mean")
    assert measured["num_rollouts"] == [ROLLOUTS] * STEPS
    for step, metrics in enumerate(decoupled.metrics):
        assert measured["response_length_mean"][step] == pytest.approx(metrics["response_length/mean"])
        assert measured["reward_mean"][step] == pytest.approx(metrics["critic/score/mean"], abs=1e-6)
        assert measured["entropy_mean"][step] == pytest.approx(metrics["actor/entropy"], abs=1e-6)


def test_lag_of_verls_own_loop_is_0(decoupled: Run) -> None:
    assert decoupled.measures(STEP_ROW, "lag_mean")["lag_mean"] == [0.0] * STEPS


def test_prompt_groups_are_verls_uids(decoupled: Run) -> None:
    assert decoupled.measures(TRAINER_ROLLOUT, "prompt_groups")["prompt_groups"] == [4] * STEPS


def test_run_and_metrics_are_described(decoupled: Run) -> None:
    run = decoupled.get()
    assert run["state"] == "finished"
    assert run["trainer"].startswith("verl 0.9")
    assert run["engine"] == "vllm"
    assert run["initial_learning_rate"] == RATE
    assert run["length_cap"] == 16
    assert decoupled.get("/scalars?name=planned_last_step")["columns"]["value"] == [STEPS] * STEPS


def test_kind_and_precision_are_those_of_verls_configuration(decoupled: Run, shared_service: RunningService) -> None:
    """verl's default: FSDP casts to bfloat16."""
    assert decoupled.get()["model_kind"] == "moe"
    trainer = logged_attributes(shared_service, decoupled.id).trainer_fingerprint
    assert trainer is not None
    assert (trainer.master_dtype, trainer.autocast) == ("bfloat16", "bfloat16")


def test_configuration_is_declared(decoupled: Run, shared_service: RunningService) -> None:
    """What verl's own defaults say; the entropies are of the forward pass of `old_log_probs`."""
    assert declared(shared_service, decoupled.id) == {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs_mode": "processed_logprobs", "length_cap": 16,
        "trainer_policy": "recomputed_old", "entropy_policy": "trainer", "clip_low": 0.2, "clip_high": 0.2,
        "loss_aggregation": "token-mean",
    }  # fmt: skip
    assert decoupled.measures(TRAINER_ROLLOUT, "surprisal_z")["surprisal_z"] == [None] * STEPS


def test_precision_of_other_strategies() -> None:
    assert precision_of({"strategy": "megatron", "megatron": {"dtype": "float16"}}) == {"master_dtype": "float16"}
    full = {"strategy": "fsdp2", "fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}}}
    assert precision_of(full) == {"master_dtype": "float32", "autocast": None}
    assert precision_of({"strategy": "veomni"}) == {}


def test_tokens_that_rejection_sampling_drops_are_logged(train: Callable[..., Run], decoupled: Run) -> None:
    """The seeds are the same, so the rollouts are those of the run without rejection."""
    run = train("rejection")
    assert run.metrics[0]["rollout_corr/rollout_rs_masked_fraction"] > 0.3
    names = ("tokens", "k3_kl")
    assert run.measures(TRAINER_ROLLOUT, *names) == decoupled.measures(TRAINER_ROLLOUT, *names)


def test_bypass_is_declared(train: Callable[..., Run]) -> None:
    run = train("bypass")
    assert run.measures(TRAINER_ROLLOUT, "k3_kl")["k3_kl"] == [0] * STEPS
    assert "bypass" in json.dumps(run.get("/steps/1/lint"))


@pytest.fixture(scope="module")
def halved(train: Callable[..., Run]) -> Run:
    """A run under advice in mode apply, whose rate is halved, and whose correction is set."""
    modes = {"FORESHOCK_ADVICE_MODE": "apply", "FORESHOCK_CORRECTION_MODE": "apply"}
    return train("decoupled", FORESHOCK_RUN_KEY="verl-halved", **modes)


def test_correction_is_set_in_mid_run_and_acknowledged(halved: Run) -> None:
    """The configuration has none; an operator sets token TIS at 1 in step 2, which is read from step 3 on."""
    largest = [metrics.get("rollout_corr/rollout_is_max") for metrics in halved.metrics]
    assert largest == [None, None, pytest.approx(1.0)]
    applied = halved.get("/advice")["correction"]["applied"]
    assert (applied["done"], applied["refused"]) == (CORRECTION, None)


def test_advice_reaches_the_optimizer_of_the_workers(halved: Run) -> None:
    assert halved.rates[0] == pytest.approx(warmed(RATE, 1, 0.0), rel=1e-4)
    assert halved.rates[-1] == pytest.approx(RATE / 2, rel=1e-4)
    assert [metrics["actor/lr"] for metrics in halved.metrics][-1] == pytest.approx(RATE / 2)


@pytest.mark.parametrize(("module", "base"), [("verl_runs", RATE), ("verl_v1_runs", 1.0)])
def test_first_update_of_a_resume_is_scaled(train: Callable[..., Run], halved: Run, module: str, base: float) -> None:
    settings = {"FORESHOCK_ADVICE_MODE": "apply", "FORESHOCK_RUN_KEY": "verl-halved"}
    resumed = train("decoupled", module, VERL_RUNS_RESUMED_FROM=str(STEPS), **settings)
    assert resumed.id == halved.id
    assert resumed.rates == pytest.approx([base / 2] * STEPS, rel=1e-4)
    # The checkpoint was validated before the first step, which keeps the step that it was saved after.
    assert "val-core/a/reward/mean@1" in resumed.metrics[0]
    assert resumed.attempts[-1]["resume_step"] == STEPS + 1
    assert resumed.measures(STEP_ROW, "num_rollouts")["step"] == list(range(1, 2 * STEPS + 1))


@pytest.fixture(scope="module")
def v1(train: Callable[..., Run]) -> Run:
    """A run of a v1 trainer, whose batches get padding rows."""
    return train("decoupled", module="verl_v1_runs")


def test_mismatch_of_a_v1_trainer_equals_verls_own(v1: Run) -> None:
    """verl's own metrics contain its padding rows, whose log-probs agree."""
    measured = v1.measures(TRAINER_ROLLOUT, "rollout_probs_diff_max", "prompt_groups", "k3_kl")
    steps = v1.measures(STEP_ROW, "num_rollouts", "response_length_mean", "reward_mean", "entropy_mean")
    assert measured["prompt_groups"] == [4] * STEPS
    assert steps["num_rollouts"] == [ROLLOUTS] * STEPS
    assert steps["entropy_mean"] == pytest.approx([1.5] * STEPS)
    for step, metrics in enumerate(v1.metrics):
        assert measured["rollout_probs_diff_max"][step] == pytest.approx(
            metrics["training/rollout_probs_diff_max"], abs=1e-6
        )
        assert measured["k3_kl"][step] > 0
        assert steps["response_length_mean"][step] == pytest.approx(metrics["response_length/mean"])
        assert steps["reward_mean"][step] == pytest.approx(metrics["critic/score/mean"], abs=1e-6)


def test_scale_and_lag_of_a_v1_trainer(v1: Run, shared_service: RunningService) -> None:
    assert v1.rates == [1.0] * STEPS
    versions = shared_service.folder / "data" / "tokens"
    files = sorted(path for path in versions.rglob("*.parquet") if v1.id in str(path))
    batches = [decode_rollouts(path.read_bytes()) for path in files]
    assert sorted(batch.attributes.trainer_weights_version or 0 for batch in batches) == [0, 1, 2]
    for batch in batches:
        assert batch.weights_version is not None
        assert set(batch.weights_version.tolist()) == {batch.attributes.trainer_weights_version}


def test_tokens_that_a_v1_trainer_rejects_are_logged(train: Callable[..., Run], v1: Run) -> None:
    run = train("rejection", module="verl_v1_runs")
    assert run.metrics[0]["rollout_corr/rollout_rs_masked_fraction"] > 0.3
    names = ("tokens", "k3_kl")
    assert run.measures(TRAINER_ROLLOUT, *names) == v1.measures(TRAINER_ROLLOUT, *names)


def test_notary_names_the_tensor_that_an_engine_missed(train: Callable[..., Run]) -> None:
    """Each step is compared; the second of two engines misses the head of the weights that sample step 2."""
    run = train(
        "decoupled", "verl_weights_runs", FORESHOCK_NOTARY="1", VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
    )  # fmt: skip
    said = {(each["step"], each["engine"]): each["sentence"] for each in run.get("/weights")["items"]}
    right = {
        (step, str(number)): f"Engine {number} of 2 holds step {step}." for step in (1, 2, 3, 4) for number in (0, 1)
    }
    assert said == right | {(2, "1"): "Engine 1 of 2 holds step 2, except lm_head, which is of step 1."}


DERIVED = ("agents", "separate", "one_step_off", "fully_async")


@pytest.fixture(scope="module")
def derived(train: Callable[..., Run]) -> Run:
    """Runs of trainers with a loop of their own, one after another in one process; `metrics` are by trainer."""
    return train(",".join(("own_advantages", *DERIVED)), "verl_derived_runs", FORESHOCK_RUN_KEY="verl-own_advantages")


@pytest.mark.parametrize("scenario", DERIVED)
def test_trainers_with_a_loop_of_their_own_are_logged(derived: Run, http: httpx.Client, scenario: str) -> None:
    run = LoggedRun(http, run_named(http, f"verl-{scenario}"))
    updates = 2 if scenario == "fully_async" else 1
    measured = run.measures(TRAINER_ROLLOUT, "rollout_probs_diff_mean", "prompt_groups")
    assert measured["step"] == list(range(1, STEPS + 1))
    assert run.measures(STEP_ROW, "num_rollouts")["num_rollouts"] == [ROLLOUTS * updates] * STEPS
    assert min(measured["rollout_probs_diff_mean"]) > 0
    assert run.get("/scalars?name=actor/grad_norm")["columns"]["step"] == measured["step"]
    # A loop of another name ends when the process makes another trainer.
    assert run.get()["state"] == "finished"
    if scenario in ("separate", "one_step_off"):
        metrics: Any = derived.metrics
        own = [each["training/rollout_probs_diff_mean"] for each in metrics[scenario]]
        assert measured["rollout_probs_diff_mean"] == pytest.approx(own, abs=1e-6)


def test_a_loop_that_calls_nothing_observed_with_a_batch_is_told_once(derived: Run, http: httpx.Client) -> None:
    told = "the metrics of two steps were logged and no rollouts"
    assert derived.output.count(told) == 1
    runs = {name: LoggedRun(http, run_named(http, f"verl-{name}")) for name in (*DERIVED, "own_advantages")}
    missing = {name: [each["sentence"] for each in run.get("/diagnosis")["missing"]] for name, run in runs.items()}
    assert [name for name, found in missing.items() if any(told in each for each in found)] == ["own_advantages"]
    run = runs["own_advantages"]
    assert run.get("/scalars?name=actor/grad_norm")["columns"]["step"] == list(range(1, STEPS + 1))


def test_updates_between_two_syncs_are_shards_of_a_step(derived: Run, http: httpx.Client) -> None:
    """The fully asynchronous trainer logs its metrics once a sync; each step was sampled by the weights before."""
    run = LoggedRun(http, run_named(http, "verl-fully_async"))
    assert run.measures(STEP_ROW, "lag_mean")["lag_mean"] == [0, 1, 1]


def test_nothing_is_observed_without_an_address() -> None:
    code = "\n".join([
        "import foreshock.integrations.verl_plugin, sys",
        "print(sum('foreshock' in str(type(finder)) for finder in sys.meta_path))",
    ])  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")}
    url = {"FORESHOCK_URL": "http://127.0.0.1:9"}
    for address, hooks in (({}, "0"), (url, "4"), ({**url, "FORESHOCK_NOTARY": "1"}, "8")):
        output = subprocess.run(
            [sys.executable, "-c", code], env={**environment, **address}, capture_output=True, text=True, check=True
        )
        assert output.stdout.strip() == hooks


def test_module_that_cannot_be_observed_is_imported_all_the_same() -> None:
    """verl imports `verl.utils.tracking`, here without the class that is observed."""
    code = "\n".join([
        "import sys, types",
        "import foreshock.integrations.verl_plugin as plugin",
        "plugin._observe('verl', 'observe_tracking', types.ModuleType('verl.utils.tracking'))",
        "print('imported')",
    ])  # fmt: skip
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "imported"
    assert "verl.utils.tracking could not be observed, training continues" in finished.stderr


def test_unknown_release_warns_once_and_names_the_known_ones(caplog: pytest.LogCaptureFixture) -> None:
    module: Any = ModuleType("ray_trainer")
    module.RayPPOTrainer = type("RayPPOTrainer", (), {"fit": lambda self: None})
    for _ in range(2):
        verl.observe_trainer(module)
    assert len(caplog.records) == 1
    assert "Known versions: 0.6, 0.7, 0.8, 0.9" in caplog.text
