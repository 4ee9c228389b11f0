"""Run verl's own v1 trainer `PPOTrainerSync.fit` on a machine without a GPU, and print what verl logged as JSON.

    python -m tests.foreshock.integrations.verl_v1_runs decoupled|rejection STEPS

Real: verl's plugin discovery, `fit` with its order of calls, `KVBatchMeta`, padding to whole mini-batches, rollout
correction, advantages, metrics and `Tracking`. Stand-ins: the TransferQueue's storage, which is a dictionary here
(the real one needs its own Ray actors), generation, the forward pass and the worker groups, which need GPUs.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import transfer_queue
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils

from tests.foreshock.integrations import verl_runs
from tests.foreshock.integrations.verl_runs import (
    PROMPTS,
    RESUMED_FROM,
    ROLLOUTS_PER_PROMPT,
    WorkerGroup,
    new_configuration,
    validate,
)

random = torch.Generator().manual_seed(7)


class Storage:
    """The rows of the queue by key."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}

    def put(self, keys: Any, partition_id: str, fields: Any = None, tags: Any = None, **_: Any) -> KVBatchMeta:
        """Add fields to rows."""
        for name in fields.keys():  # noqa: SIM118  # A TensorDict has no items of its rows.
            values = fields[name]
            rows = values.unbind() if isinstance(values, torch.Tensor) else list(values.tolist())
            for key, value in zip(keys, rows, strict=True):
                self.rows.setdefault(key, {})[name] = value
        self.tags |= dict(zip(keys, tags or [], strict=tags is not None))
        return KVBatchMeta(partition_id=partition_id, keys=list(keys), tags=[self.tags[key] for key in keys])

    def get(self, keys: Any, partition_id: str, select_fields: Any = None) -> TensorDict:
        """Return fields of rows as jagged tensors; a field that they lack is left out."""
        names = select_fields if select_fields is not None else list(self.rows[keys[0]])
        found = {}
        for name in names:
            values = [self.rows[key][name] for key in keys if name in self.rows[key]]
            if len(values) != len(keys):
                continue
            tensors = isinstance(values[0], torch.Tensor)
            found[name] = (
                torch.nested.as_nested_tensor(values, layout=torch.jagged) if tensors else NonTensorStack(*values)
            )
        return TensorDict(found, batch_size=len(keys))

    def clear(self, keys: Any, partition_id: str) -> None:
        """Remove rows."""
        for key in keys:
            self.rows.pop(key, None)


storage = Storage()


class Replay:
    """Samples random tokens in place of the replay buffer, with the fields and tags of verl's agent loops."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """Return the rollouts of `batch_size` prompts."""
        keys, tags = [], []
        for prompt in range(batch_size):
            for session in range(ROLLOUTS_PER_PROMPT):
                key = f"u{global_steps}x{prompt}_{session}_0"
                ids = [torch.randint(1, 50, (int(torch.randint(2, 9, (1,), generator=random)),), generator=random)
                       for _ in range(2)]  # fmt: skip
                length = len(ids[1])
                scores = torch.zeros(length)
                scores[-1] = float(session % 2)
                storage.rows[key] = {
                    "prompts": ids[0], "responses": ids[1], "input_ids": torch.cat(ids), "rm_scores": scores,
                    "response_mask": torch.ones(length, dtype=torch.long), "uid": f"u{global_steps}x{prompt}",
                    "rollout_log_probs": -torch.rand(length, generator=random) * 3, "num_turns": 2,
                    "position_ids": torch.arange(len(ids[0]) + length), "multi_modal_inputs": {},
                    "loss_mask": torch.ones(length, dtype=torch.long), "attention_mask": torch.ones(1),
                }  # fmt: skip
                keys.append(key)
                tags.append({"prompt_len": len(ids[0]), "response_len": length, "seq_len": len(ids[0]) + length,
                             "min_global_steps": global_steps - 1, "max_global_steps": global_steps - 1})  # fmt: skip
                storage.tags[key] = tags[-1]
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags), {}


class QueueWorkers(WorkerGroup):
    """The driver's handle of the workers: reads from and writes to the queue."""

    def __init__(self) -> None:
        super().__init__()
        self._dispatch_info = {"actor": [0]}
        self.scales: list[float | None] = []

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Put log-probs and entropies of whole sequences: the engine's and noise."""
        for key in batch.keys:
            row = storage.rows[key]
            length, total = len(row["responses"]), len(row["input_ids"])
            values = torch.zeros(total)
            noise = 0.02 * torch.randn(length, generator=random)
            values[total - 1 - length : total - 1] = (row["rollout_log_probs"] + noise).clamp(max=0)
            row["log_probs"], row["entropy"] = values, torch.full((total,), 1.5)
        return batch

    def update_actor(self, batch: KVBatchMeta) -> Any:
        """Give verl's worker the batch's extra information, as the queue's bridge does."""
        data = TensorDict({}, batch_size=(len(batch),))
        for name, value in batch.extra_info.items():
            tensordict_utils.assign_non_tensor_data(data, name, value)
        self.scales.append(tensordict_utils.get(data, key="foreshock_learning_rate_scale", default=None))
        return {"metrics": {"grad_norm": [1.0], "mfu": [0.0], "lr": [verl_runs.RATE]}}


def new_trainer(scenario: str, steps: int) -> Any:
    """Return a trainer with the attributes that `fit` reads."""
    configuration = new_configuration(scenario)
    # Mini-batches of 3 prompts: verl adds padding rows to the 16 rollouts of 4 prompts.
    configuration.actor_rollout_ref.actor.ppo_mini_batch_size = 3
    configuration.data.train_batch_size = PROMPTS
    trainer = PPOTrainerSync.__new__(PPOTrainerSync)
    nothing = SimpleNamespace(sleep_replicas=lambda: None, update_weights=lambda *_: None)
    trainer.config = configuration
    trainer.trainer_mode, trainer.parameter_sync_step, trainer.local_trigger_step = "sync", 1, 0
    trainer.use_critic = trainer.use_reference_policy = trainer.use_teacher_policy = False
    trainer.global_steps, trainer.total_training_steps = RESUMED_FROM, RESUMED_FROM + steps
    trainer.steps_per_epoch = steps
    trainer.checkpoint_manager = nothing
    trainer.replay_buffer = Replay()
    trainer.actor_rollout_wg = QueueWorkers()
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
    trainer.tokenizer = SimpleNamespace(eos_token_id=2, pad_token_id=0)
    trainer._rollout_moe_lb_metrics_accumulator = None
    trainer.prepare_step = dict
    trainer._validate = validate
    trainer._shutdown_dump_executor = lambda: None
    return trainer


def main() -> None:
    """Train, and print verl's metrics."""
    transfer_queue.kv_batch_put = storage.put
    transfer_queue.kv_batch_get = storage.get
    transfer_queue.kv_clear = storage.clear
    verl_runs.note_metrics()
    trainer = new_trainer(sys.argv[1], int(sys.argv[2]))
    trainer.fit(None)
    print("LOG " + json.dumps({"metrics": verl_runs.logged, "rates": trainer.actor_rollout_wg.scales}))


if __name__ == "__main__":
    main()
