"""Run verl's trainers that have a `fit` of their own on a machine without a GPU; print what each logged as JSON.

    python -m tests.foreshock.integrations.verl_derived_runs SCENARIO,… STEPS

Real: the classes of verl (`agents` derives one as agent frameworks do, whose loop is not called `fit`), their loops and
what `verl_runs` keeps of verl. Stand-ins besides those of `verl_runs`: the rollouter of the fully asynchronous trainer
and its weight sync, which need Ray actors.
"""

import asyncio
import inspect
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer
from verl.experimental.one_step_off_policy.ray_trainer import OneStepOffRayTrainer
from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage
from verl.utils.tracking import Tracking

from tests.foreshock.integrations import verl_runs
from tests.foreshock.integrations.verl_runs import PROMPTS, ROLLOUTS_PER_PROMPT, Generation

UPDATES_PER_SYNC = 2


class AgentTrainer(RayPPOTrainer):  # type: ignore[misc]
    """A trainer whose loop calls the workers and verl's functions itself, as rLLM's and Agent-Lightning's do."""

    computes_advantages = True

    def fit_agent(self) -> None:
        """Train on each batch; of verl's functions only `compute_advantage` and `Tracking.log` are called."""
        logger = Tracking("verl", "agents", default_backend=["console"])
        for step, _ in enumerate(self.train_dataloader, start=1):
            self.global_steps = step
            batch = sampled(0)
            batch.batch["old_log_probs"] = (batch.batch["rollout_log_probs"] - 0.01) * batch.batch["response_mask"]
            batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
            if self.computes_advantages:
                compute_advantage(batch, adv_estimator="grpo", config=self.config.algorithm)
            logger.log(data={"training/global_step": step, "actor/grad_norm": 1.0}, step=step)


class AsyncGeneration(Generation):
    """Samples as a coroutine."""

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        """Return what `Generation` does."""
        return super().generate_sequences(batch)


class Workers(verl_runs.WorkerGroup):
    """The driver's handle of the workers, which save and restore their weights."""

    def __getattr__(self, name: str) -> Any:
        if name in ("save_model_to_cpu", "restore_model_from_cpu", "clear_cpu_model"):
            return lambda _: None
        raise AttributeError(name)


def sampled(version: int) -> DataProto:
    """Return the rollouts of all prompts, sampled by a version of the weights."""
    batch = Generation().generate_sequences(DataProto.from_single_dict({"index": torch.arange(
        PROMPTS * ROLLOUTS_PER_PROMPT)}))  # fmt: skip
    rows = PROMPTS * ROLLOUTS_PER_PROMPT
    batch.non_tensor_batch |= {
        "uid": np.repeat(np.arange(PROMPTS), ROLLOUTS_PER_PROMPT).astype(str).astype(object),
        "min_global_steps": np.full(rows, version), "max_global_steps": np.full(rows, version),
    }  # fmt: skip
    batch.meta_info = {
        "trajectory_param_versions": [version] * rows,
        "global_token_num": batch.batch["attention_mask"].sum(dim=-1).tolist(),
    }
    return batch


def with_state(trainer: Any) -> None:
    """Set the attributes that the constructor of a separated trainer sets."""
    trainer.global_steps = trainer.epoch = trainer.max_steps_duration = 0
    trainer.metrics, trainer.timing_raw, trainer.is_last_step = {}, {}, False
    trainer.prev_step_profile = trainer.curr_step_profile = trainer.next_step_profile = False
    OmegaConf.update(trainer.config, "actor_rollout_ref.hybrid_engine", False, force_add=True)
    OmegaConf.update(trainer.config, "trainer.resume_mode", "disable", force_add=True)


def with_queue(trainer: Any, steps: int) -> None:
    """Let a fully asynchronous trainer take batches that the weights of the sync before sampled."""
    from verl.experimental.fully_async_policy.detach_utils import MetricsAggregator

    trainer.current_param_version, trainer.local_trigger_step = 0, 1
    trainer.trigger_parameter_sync_step, trainer.last_ckpt_version = UPDATES_PER_SYNC, 0
    trainer.stale_trajectory_processed, trainer.required_samples = 0, PROMPTS
    trainer.dynamic_schedule_enabled, trainer.dynamic_resource_controller = False, None
    trainer.rollouter, trainer.progress_bar = SimpleNamespace(), SimpleNamespace(update=lambda _: 0, close=lambda: 0)
    trainer.message_queue_client = SimpleNamespace(get_queue_size_sync=lambda: 0)
    trainer.metrics_aggregator = MetricsAggregator(total_gpus=1, hybrid_gpus=0, standalone_gpus=1)
    trainer.logger = Tracking("verl", "fully_async", default_backend=["console"])

    async def take() -> tuple[int, DataProto | None]:
        done = trainer.current_param_version == steps
        return 0, None if done else sampled(max(trainer.current_param_version - 1, 0))

    async def sync() -> dict[str, Any] | None:
        return {} if trainer.local_trigger_step == 1 else None

    trainer._get_samples_from_queue, trainer._fit_update_weights = take, sync


CLASSES = {
    "separate": SeparateRayPPOTrainer, "one_step_off": OneStepOffRayTrainer, "agents": AgentTrainer,
    "own_advantages": AgentTrainer, "fully_async": FullyAsyncTrainer.__ray_metadata__.modified_class,
}  # fmt: skip


def train(scenario: str, steps: int) -> None:
    """Train with the trainer of a scenario, to a run of its name."""
    os.environ["FORESHOCK_RUN_KEY"] = f"verl-{scenario}"
    trainer = verl_runs.new_trainer("decoupled", steps, CLASSES[scenario])
    trainer.actor_rollout_wg = Workers()
    if isinstance(trainer, AgentTrainer):
        trainer.computes_advantages = scenario == "agents"
        trainer.fit_agent()
        return
    with_state(trainer)
    if scenario == "one_step_off":
        trainer.async_rollout_manager = AsyncGeneration()
    if scenario == "fully_async":
        with_queue(trainer, steps)
    result = trainer.fit()
    if inspect.iscoroutine(result):
        asyncio.run(result)


def main() -> None:
    """Train with each trainer, and print verl's metrics by scenario."""
    found = {}
    with verl_runs.process_group():
        verl_runs.note_metrics()
        for scenario in sys.argv[1].split(","):
            verl_runs.logged.clear()
            train(scenario, int(sys.argv[2]))
            found[scenario] = list(verl_runs.logged)
    print("LOG " + json.dumps({"metrics": found, "rates": []}))


if __name__ == "__main__":
    main()
