"""Run verl's own `RayPPOTrainer.fit` on a machine without a GPU, and print what verl logged as JSON.

    python -m tests.foreshock.integrations.verl_runs bypass|decoupled|rejection STEPS

Real: verl's plugin discovery, `fit` with its order of calls, `DataProto`, rewards, rollout correction, advantages,
metrics, `Tracking`, and `TrainingWorker.train_mini_batch` with a torch optimizer. Stand-ins, because verl needs GPUs
for them: the worker groups' processes, generation (random tokens), the forward pass (log-probs with known noise).
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed
import verl
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils import tensordict_utils
from verl.utils.tracking import Tracking
from verl.workers.engine_workers import TrainingWorker

from tests.foreshock.integrations.operators import halve_learning_rate

PROMPTS, ROLLOUTS_PER_PROMPT, PROMPT_LENGTH, RESPONSE_LENGTH = 4, 4, 6, 16
RATE = 1e-3
HALVED_AT = 2
# The step of the checkpoint that is resumed from.
RESUMED_FROM = int(os.environ.get("VERL_RUNS_RESUMED_FROM", "0"))

random = torch.Generator().manual_seed(7)
logged: list[dict[str, float]] = []


class Generation:
    """Samples random tokens of random lengths."""

    def generate_sequences(self, batch: DataProto) -> DataProto:
        """Return prompts (padded left), responses (padded right) and the engine's log-probs."""
        size = len(batch)
        prompt_lengths = torch.randint(2, PROMPT_LENGTH + 1, (size,), generator=random)
        lengths = torch.randint(3, RESPONSE_LENGTH + 1, (size,), generator=random)
        prompt_mask = (torch.arange(PROMPT_LENGTH) >= PROMPT_LENGTH - prompt_lengths[:, None]).long()
        response_mask = (torch.arange(RESPONSE_LENGTH) < lengths[:, None]).long()
        prompts = torch.randint(1, 50, (size, PROMPT_LENGTH), generator=random) * prompt_mask
        responses = torch.randint(1, 50, (size, RESPONSE_LENGTH), generator=random) * response_mask
        attention = torch.cat([prompt_mask, response_mask], dim=1)
        log_probs = -torch.rand(size, RESPONSE_LENGTH, generator=random) * 3 * response_mask
        scores = torch.zeros(size, RESPONSE_LENGTH)
        scores[torch.arange(size), lengths - 1] = torch.randint(0, 2, (size,), generator=random).float()
        return DataProto.from_dict(
            tensors={
                "prompts": prompts, "responses": responses, "input_ids": torch.cat([prompts, responses], dim=1),
                "attention_mask": attention, "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
                "response_mask": response_mask, "rollout_log_probs": log_probs, "rm_scores": scores,
            },
            non_tensors={"multi_modal_inputs": np.array([{}] * size, dtype=object)},
            meta_info={"timing": {}},
        )  # fmt: skip


class Engine:
    """A training engine with one parameter and a torch optimizer."""

    def __init__(self) -> None:
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
        self.rates: list[float] = []

    def get_data_parallel_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_group(self) -> Any:
        return None

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    @contextlib.contextmanager
    def train_mode(self, **_: Any) -> Iterator[None]:
        yield

    def step(self) -> None:
        """Do an optimizer step, and note the rate in it."""
        parameter = self.optimizer.param_groups[0]["params"][0]
        before = float(parameter)
        parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.rates.append(before - float(parameter))

    def lr_scheduler_step(self) -> float:
        self.lr_scheduler.step()
        return float(self.lr_scheduler.get_last_lr()[0])


class Worker(TrainingWorker):  # type: ignore[misc]
    """verl's worker without its process: `train_mini_batch` is verl's."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.profiler = SimpleNamespace(step=lambda: None)

    def train_batch(self, data: Any) -> Any:
        self.engine.step()
        metrics = {"grad_norm": 1.0, "mfu": 0.0}
        if tensordict_utils.get(data, key="update_lr_scheduler", default=False):
            metrics["lr"] = self.engine.lr_scheduler_step()
        return tensordict_utils.get_tensordict({}, non_tensor_dict={"metrics": metrics})


class WorkerGroup:
    """The driver's handle of the workers, which are one object here."""

    def __init__(self) -> None:
        self.worker = Worker()

    def compute_log_prob(self, data: Any) -> Any:
        """Return the engine's log-probs plus noise, as jagged tensors over prompt and response."""
        offsets = data["input_ids"].offsets()
        total = int(offsets[-1])
        values, entropies = torch.zeros(total), torch.zeros(total)
        mask, engine = data["response_mask"], data["rollout_log_probs"]
        for row in range(mask.shape[0]):
            length, end = int(mask[row].sum()), int(offsets[row + 1])
            noise = 0.02 * torch.randn(length, generator=random)
            # The log-prob of a token stands at the position before it.
            values[end - 1 - length : end - 1] = (engine[row, :length] + noise).clamp(max=0)
            entropies[end - 1 - length : end - 1] = 1.5
        jagged = {"log_probs": values, "entropy": entropies}
        tensors = {name: torch.nested.nested_tensor_from_jagged(each, offsets) for name, each in jagged.items()}
        return tensordict_utils.get_tensordict(tensors, non_tensor_dict={"metrics": {"mfu": 0.0}})

    def update_actor(self, data: Any) -> Any:
        """Let verl's worker train on the batch."""
        train = TrainingWorker.train_mini_batch
        return train(self.worker, data)


def new_model_folder() -> Path:
    """Return a folder with the configuration of a mixture of experts."""
    folder = Path(os.environ["FORESHOCK_SPOOL_DIRECTORY"]) / "model"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 8}))
    return folder


def new_configuration(scenario: str) -> Any:
    """Return verl's default configuration with the changes of a scenario."""
    defaults = Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    configuration = OmegaConf.load(defaults)
    correction = {
        "bypass": {"bypass_mode": True, "loss_type": "ppo_clip"},
        "decoupled": None,
        "rejection": {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.99_1.01",
                      "bypass_mode": False},
    }[scenario]  # fmt: skip
    OmegaConf.set_struct(configuration, False)
    changes = {
        "trainer.logger": ["console"], "trainer.val_before_train": RESUMED_FROM > 0, "trainer.test_freq": -1,
        "trainer.save_freq": -1, "trainer.total_epochs": 1 + RESUMED_FROM, "trainer.balance_batch": False,
        "trainer.project_name": "verl", "trainer.experiment_name": scenario,
        "algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": False,
        "algorithm.rollout_correction": correction,
        "actor_rollout_ref.rollout.n": ROLLOUTS_PER_PROMPT, "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.response_length": RESPONSE_LENGTH,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS, "actor_rollout_ref.actor.optim.lr": RATE,
        "actor_rollout_ref.model.path": str(new_model_folder()), "critic.enable": False, "reward_model.enable": False,
    }  # fmt: skip
    for name, value in changes.items():
        OmegaConf.update(configuration, name, value, force_add=True)
    return configuration


def validate() -> dict[str, float]:
    """Return what verl's validation of a checkpoint's weights returns."""
    return {"val-core/a/reward/mean@1": 0.5}


def new_trainer(scenario: str, steps: int, trainer_class: Any = RayPPOTrainer) -> Any:
    """Return a trainer with the attributes that `fit` reads."""
    configuration = new_configuration(scenario)
    trainer = trainer_class.__new__(trainer_class)
    nothing = SimpleNamespace(sleep_replicas=lambda: None, update_weights=lambda *_: None)
    trainer.config = configuration
    trainer.use_rm = trainer.use_critic = trainer.use_reference_policy = False
    trainer.train_dataset = SimpleNamespace()
    trainer.train_dataloader = [{"index": torch.arange(PROMPTS)} for _ in range(steps)]
    trainer.total_training_steps = RESUMED_FROM + steps
    trainer.checkpoint_manager = nothing
    trainer.async_rollout_manager = Generation()
    trainer.actor_rollout_wg = WorkerGroup()
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
    trainer._load_checkpoint = lambda: setattr(trainer, "global_steps", RESUMED_FROM)
    trainer._validate = validate
    trainer._init_dump_executor()
    return trainer


def halve(trainer: Any) -> None:
    """Halve the learning rate as an operator while step HALVED_AT is sampled."""
    own = trainer.async_rollout_manager.generate_sequences

    def generate(batch: DataProto) -> DataProto:
        if trainer.global_steps == HALVED_AT:
            halve_learning_rate("a test of verl")
        result: DataProto = own(batch)
        return result

    trainer.async_rollout_manager.generate_sequences = generate


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Have torch's process group of one rank."""
    rendezvous = Path(os.environ["FORESHOCK_SPOOL_DIRECTORY"]) / f"rendezvous-{os.getpid()}"
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def note_metrics() -> None:
    """Keep what verl logs in `logged`."""
    own_log = Tracking.log

    def note(self: Any, data: Any, step: int, backend: Any = None) -> None:
        logged.append({name: float(each) for name, each in data.items() if isinstance(each, int | float | np.number)})
        own_log(self, data, step, backend)

    Tracking.log = note


def main() -> None:
    """Train, and print verl's metrics and the rates of the optimizer's steps."""
    scenario, steps = sys.argv[1], int(sys.argv[2])
    with process_group():
        note_metrics()
        trainer = new_trainer(scenario, steps)
        if os.environ.get("FORESHOCK_ADVICE_MODE") == "apply" and not RESUMED_FROM:
            halve(trainer)
        trainer.fit()
    print("LOG " + json.dumps({"metrics": logged, "rates": trainer.actor_rollout_wg.worker.engine.rates}))


if __name__ == "__main__":
    main()
