"""slime's hooks in training processes with Megatron's groups, optimizer and scheduler, logged to a real service.

What of slime is real and what is written after its documented schema is told in `slime_runs.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from foreshock.client.reporting import LogOnce
from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.integrations.slime import SlimeRun, apply_advice, log_rollouts
from foreshock.integrations.slime_columns import columns_of
from foreshock.integrations.slime_framework import FRAMEWORKS, Place
from foreshock.learning_rate.length_decay import warmed
from foreshock.learning_rate.levers import Correction
from tests.foreshock.integrations.logged_attributes import declared, logged_attributes
from tests.foreshock.integrations.logged_runs import LoggedRun, run_named
from tests.foreshock.integrations.preloaded import Preloaded, preloaded
from tests.foreshock.running_service import RunningService
from tests.ports import free_port

pytestmark = pytest.mark.slow

STEPS = 4
ROLLOUTS = 12
RATE = 1e-3
HALVED_AT = 2
FIGURES = ("k3_kl", "k3_kl_seq_mean", "mean_abs_d", "tokens")


@dataclass(frozen=True, slots=True)
class Run(LoggedRun):
    """A run: slime's own figures by step, the rates of each rank's optimizers by step, the output of all ranks."""

    figures: list[dict[str, float]]
    rates: list[list[list[float]]]
    critic_rates: list[float]
    output: str


@pytest.fixture(scope="module")
def megatron() -> Iterator[Preloaded]:
    """A process that has imported Megatron."""
    with preloaded(
        "megatron.core", "megatron.core.optimizer.optimizer", "megatron.core.optimizer_param_scheduler"
    ) as process:
        yield process


@pytest.fixture(scope="module")
def launch(
    shared_service: RunningService, tmp_path_factory: pytest.TempPathFactory, megatron: Preloaded
) -> Callable[..., tuple[list[Any], str]]:
    """Train with `ranks` processes: returns what each printed, and the output of all."""

    def run(scenario: str, ranks: int, **settings: str) -> tuple[list[Any], str]:
        folder = tmp_path_factory.mktemp("slime")
        settings = {"FORESHOCK_URL": shared_service.url, "FORESHOCK_WEIGHTS_ROOT": "weights",
                    "FORESHOCK_SPOOL_DIRECTORY": str(folder / "spool"), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks), **settings}  # fmt: skip
        environments = [settings | {"RANK": str(rank)} for rank in range(ranks)]
        return megatron.run(folder, "tests.foreshock.integrations.slime_runs", [scenario, str(STEPS)], environments)

    return run


@pytest.fixture(scope="module")
def train(http: httpx.Client, launch: Callable[..., tuple[list[Any], str]]) -> Callable[..., Run]:
    """Train with `ranks` processes and find the run: `train(scenario, ranks)`."""

    def run(scenario: str, ranks: int = 1, **settings: str) -> Run:
        key = f"slime-{scenario}-{ranks}"
        logs, output = launch(scenario, ranks, FORESHOCK_RUN_KEY=key, **settings)
        rates = [log["rates"] for log in logs]
        return Run(http, run_named(http, key), logs[0]["figures"], rates, logs[0]["critic_rates"], output)

    return run


@pytest.fixture(scope="module")
def tools(train: Callable[..., Run]) -> Run:
    """Two data-parallel ranks with tool output in the responses, under advice in mode apply."""
    return train("tools", 2, FORESHOCK_ADVICE_MODE="apply")


def assert_figures_are_slimes(run: Run) -> None:
    """Compare with slime's figures of the same steps."""
    measured = run.measures(TRAINER_ROLLOUT, *FIGURES)
    for step, figures in enumerate(run.figures):
        for name in FIGURES:
            assert measured[name][step] == pytest.approx(figures[name], abs=1e-6), name


def test_mismatch_of_data_parallel_ranks_and_of_split_contexts_equals_slimes(
    train: Callable[..., Run], tools: Run
) -> None:
    assert_figures_are_slimes(tools)
    assert_figures_are_slimes(train("context", 2))


def test_lengths_rewards_and_groups_equal_slimes(tools: Run) -> None:
    names = ("num_rollouts", "response_length_mean", "reward_mean", "truncated_fraction")
    measured = tools.measures(STEP_ROW, *names)
    assert measured["num_rollouts"] == [ROLLOUTS] * STEPS
    for step, figures in enumerate(tools.figures):
        for name in ("response_length_mean", "reward_mean"):
            assert measured[name][step] == pytest.approx(figures[name], abs=1e-6)
    assert min(measured["truncated_fraction"]) > 0
    assert tools.measures(TRAINER_ROLLOUT, "prompt_groups")["prompt_groups"] == [3] * STEPS


def test_advice_reaches_every_megatron_optimizer_of_every_rank(tools: Run) -> None:
    """A chain of two optimizers, whose scheduler rewrites the rates at each step."""
    for rates in tools.rates:
        for step in range(HALVED_AT):
            assert rates[step] == pytest.approx([warmed(RATE, step, 0.0)] * 2, rel=1e-4)
        assert rates[-1] == pytest.approx([RATE / 2, RATE / 2], rel=1e-4)
    assert tools.critic_rates == [RATE] * STEPS


def test_run_metrics_and_checkpoints_are_logged(tools: Run) -> None:
    run = tools.get()
    assert run["state"] == "finished"
    assert run["trainer"].startswith("slime")
    assert (run["engine"], run["model_kind"], run["length_cap"]) == ("sglang", "moe", 20)
    assert run["initial_learning_rate"] == RATE
    assert [each["step"] for each in tools.get("/checkpoints")["items"]] == [1, 2, 3, 4]
    assert tools.get("/checkpoints")["items"][0]["path"] == "step_0/model"
    scalars = tools.get("/scalars?name=train/grad_norm")["columns"]
    assert (scalars["step"], scalars["value"]) == ([0, 1, 2, 3], [2.0, 3.0, 4.0, 5.0])
    assert tools.get("/scalars?name=planned_last_step")["columns"]["value"] == [STEPS - 1.0] * STEPS


def test_environment_and_precision_of_the_trainer_are_logged(tools: Run, shared_service: RunningService) -> None:
    trainer = logged_attributes(shared_service, tools.id).trainer_fingerprint
    assert trainer is not None
    assert (trainer.master_dtype, trainer.autocast) == ("bfloat16", None)
    assert trainer.cpu_isa
    assert trainer.library_versions["megatron-core"]


def test_arguments_are_declared(tools: Run, shared_service: RunningService) -> None:
    assert declared(shared_service, tools.id) == {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs_mode": "processed_logprobs", "length_cap": 20,
        "trainer_policy": "recomputed_old", "entropy_policy": "trainer", "clip_low": 0.2, "clip_high": 0.28,
        "loss_aggregation": "token-mean",
    }  # fmt: skip


def test_log_probs_that_only_the_loss_computes_are_logged(train: Callable[..., Run]) -> None:
    """slime skips its own forward pass if a rollout is trained on in one optimizer step."""
    run = train("reused")
    assert_figures_are_slimes(run)
    assert run.measures(STEP_ROW, "entropy_mean")["entropy_mean"] == [1.5] * STEPS


def test_samples_that_are_removed_from_the_loss_are_logged(train: Callable[..., Run]) -> None:
    run = train("removed")
    measured = run.measures(STEP_ROW, "num_rollouts", "response_length_mean")
    assert measured["num_rollouts"] == [ROLLOUTS] * STEPS
    assert measured["response_length_mean"][0] > run.figures[0]["response_length_mean"]


def test_released_slime_has_its_functions_elsewhere(train: Callable[..., Run]) -> None:
    """0.2.4 and 0.3.0 log from the actor and `slime.utils`, and save from the model's module."""
    run = train("released", 2, FORESHOCK_NOTARY="1")
    assert_figures_are_slimes(run)
    assert run.get()["state"] == "finished"
    assert len(run.get("/checkpoints")["items"]) == STEPS
    assert "cannot be observed" not in run.output
    # The weights that are sent after the last step sample nothing.
    said = {(each["step"], each["engine"]): each["sentence"] for each in run.get("/weights")["items"]}
    right = {
        (step, str(number)): f"Engine {number} of 2 holds step {step}." for step in range(1, STEPS) for number in (0, 1)
    }
    assert said == right | {(2, "1"): "Engine 1 of 2 holds step 2, except lm_head, which is of step 1."}


def test_miles_passes_no_rollouts_to_its_hook(train: Callable[..., Run]) -> None:
    run = train("miles")
    assert_figures_are_slimes(run)
    assert run.get()["trainer"].startswith("miles")
    assert len(run.get("/checkpoints")["items"]) == STEPS


def test_missing_log_probs_of_the_engine_are_named_once(train: Callable[..., Run]) -> None:
    run = train("unlogged")
    assert run.output.count("Sample.rollout_log_probs") == 1
    assert run.measures(STEP_ROW, "num_rollouts")["num_rollouts"] == [ROLLOUTS] * STEPS
    assert run.measures(TRAINER_ROLLOUT, "k3_kl")["k3_kl"] == []


def test_other_release_warns_once_and_names_the_known_one(train: Callable[..., Run]) -> None:
    run = train("old")
    assert run.output.count("has no backends.megatron_utils.loss.get_log_probs_and_entropy") == 1
    assert "Known versions: 0.2, 0.3" in run.output
    assert run.output.count("--get-mismatch-metrics computes them") == 1
    assert run.measures(STEP_ROW, "num_rollouts")["num_rollouts"] == [ROLLOUTS] * STEPS


def test_rank_without_a_client_joins_its_context_group(launch: Callable[..., tuple[list[Any], str]]) -> None:
    """One rank of the group has a client, which refuses its configuration; the other does not ask for one."""
    logs, output = launch("context", 2, FORESHOCK_MODE="nonsense")
    assert [len(log["rates"]) for log in logs] == [STEPS] * 2
    assert "could not be observed, training continues" in output


def test_rank_that_observes_nothing_takes_the_scale_of_the_others(launch: Callable[..., tuple[list[Any], str]]) -> None:
    logs, output = launch("unobserved", 2, FORESHOCK_RUN_KEY="slime-unobserved")
    assert [len(log["rates"]) for log in logs] == [STEPS] * 2
    assert logs[0]["rates"] == logs[1]["rates"]
    assert output.count("RuntimeError: this rank cannot observe the framework") == 1


TIS = Correction("token_tis", "2")


def slime_run(given: set[str], **arguments: Any) -> SlimeRun:
    args = SimpleNamespace(**{"use_tis": False, "tis_clip": 5.0, "tis_clip_low": 0.5, **arguments})
    run = SlimeRun(args, FRAMEWORKS[0], Place(0, 1, True, 0, 1), LogOnce("foreshock.tests"))
    run._given = given
    return run


def test_correction_sets_the_arguments_that_the_loss_reads_and_takes_them_back() -> None:
    run = slime_run({"log_probs", "rollout_log_probs"})
    assert run._set_correction(TIS) is None
    assert (run.args.use_tis, run.args.tis_clip, run.args.tis_clip_low) == (True, 2.0, 0.0)
    assert run._set_correction(None) is None
    assert (run.args.use_tis, run.args.tis_clip, run.args.tis_clip_low) == (False, 5.0, 0.5)


@pytest.mark.parametrize(
    ("correction", "given", "arguments", "refused"),
    [
        (TIS, {"log_probs"}, {}, "restart with them"),
        (TIS, {"log_probs", "rollout_log_probs"}, {"custom_tis_function_path": "mine.tis"}, "replaces its truncation"),
        (TIS, {"log_probs", "rollout_log_probs"}, {"use_rollout_logprobs": True}, "no ratio of the two"),
        (Correction("sequence_mis", "2"), {"log_probs", "rollout_log_probs"}, {}, "--custom-tis-function-path"),
    ],
)
def test_correction_that_slime_cannot_change_in_mid_run_is_refused(
    correction: Correction, given: set[str], arguments: dict[str, Any], refused: str
) -> None:
    run = slime_run(given, **arguments)
    assert refused in (run._set_correction(correction) or "")
    assert run.args.use_tis is False


def test_dynamic_sampling_is_told(tools: Run) -> None:
    assert tools.output.count("groups that the filter drops") == 1


def test_hooks_outside_of_a_training_process_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        log_rollouts(None, 0, {})
        apply_advice(None, 0, 0, [], None, None)
    assert len(caplog.records) == 1
    assert "Known: slime (0.2, 0.3), vime (0.2), miles (0.0, 0.1)" in caplog.text


def test_removed_samples_with_tool_output_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Their mask of zeros does not tell tool output from sampled tokens."""
    data = {
        "tokens": [np.arange(5), np.arange(5, 9)], "total_lengths": [5, 4], "response_lengths": [3, 3],
        "loss_masks": [np.array([1, 0, 1]), np.array([0, 0, 0])], "sample_indices": [4, 9],
    }  # fmt: skip
    scores = {"rollout_log_probs": np.arange(6, dtype=np.float32)}
    columns = columns_of(data, scores, step=0, samples_per_prompt=4, log=LogOnce("foreshock.test_slime"))
    assert columns["response_token_ids"].tolist() == [2, 3, 4]
    assert columns["prompt_token_ids"].tolist() == [0, 1]
    assert columns["rollout_log_probs"].tolist() == [0, 1, 2]
    assert columns["group_id"] == ["1"]
    assert "removed from the loss" in caplog.text
