"""Write the dumps of `dumps/` with the frameworks' own writers, from rollouts of the recorded tiny run.

python -m tests.foreshock.importers.make_dumps CHECKOUTS

CHECKOUTS has a folder per framework: prime-rl, RL (NeMo-RL), slime, miles and SkyRL, at the revisions of `README.md`.
Only the writers run: what they import and is not installed (megatron, ray, wandb, configuration classes, …) is replaced
by empty modules, whose names are printed. The figures in `figures.json` are computed by the frameworks' own formulas.
"""

import importlib.abc
import importlib.machinery
import json
import shutil
import sys
import types
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

from foreshock.rollouts import RolloutBatch, decode_rollouts
from tests.paths import REPOSITORY

DUMPS = Path(__file__).parent / "dumps"
STEPS = (1, 45)
ROLLOUTS = 8
PAD = 0
_ABSENT = (
    "beartype", "jaxtyping", "matplotlib", "megatron", "miles.backends.training_utils.parallel", "mlflow",
    "nemo_rl.data.interfaces", "nemo_rl.data.multimodal_utils", "nemo_rl.data.packing",
    "nemo_rl.distributed.collectives", "nemo_rl.models", "prime_rl.configs", "prime_rl.utils.utils", "ray",
    "skyrl._compat", "skyrl.backends.skyrl_train.distributed", "skyrl.train.dataset.dataset", "slime.backends",
    "slime.utils.misc", "swanlab", "torch.utils.tensorboard", "wandb",
)  # fmt: skip


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes empty modules for the names of `_ABSENT`."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if any(name == absent or name.startswith(absent + ".") for absent in _ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        self.made.append(spec.name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def rollouts_of(step: int) -> RolloutBatch:
    """Return the rollouts of two prompts; the last one ends with two tokens that were not sampled."""
    file = REPOSITORY / "examples" / "tiny_rl" / "recorded" / "rollouts" / f"step_{step:04d}.parquet"
    batch = decode_rollouts(file.read_bytes())
    return batch.select([0, 1, 2, 3, 16, 17, 18, 19])


def lists(batch: RolloutBatch) -> list[dict[str, Any]]:
    """Return the rollouts as lists."""
    assert batch.rollout_log_probs is not None
    assert batch.trainer_log_probs is not None
    assert batch.reward is not None
    assert batch.group_ids is not None
    found = []
    for row in range(batch.num_rollouts):
        prompt = batch.prompt_token_ids[slice(*batch.prompt_offsets[row : row + 2])].tolist()
        place = slice(*batch.response_offsets[row : row + 2])
        response = batch.response_token_ids[place].tolist()
        sampled = [1] * len(response)
        if row == batch.num_rollouts - 1:
            sampled[-2:] = [0, 0]
        reward = float(batch.reward[row])
        found.append(
            {"prompt": prompt, "response": response, "mask": sampled, "reward": reward, "group": batch.group_ids[row],
             "mu": batch.rollout_log_probs[place].tolist(), "pi": batch.trainer_log_probs[place].tolist(),
             "advantage": reward - 0.5}
        )  # fmt: skip
    return found


def own(module: str, name: str) -> Any:
    """Return a name of a framework."""
    return getattr(importlib.import_module(module), name)


def replace(module: str, **names: Any) -> None:
    """Replace names of a module."""
    for name, value in names.items():
        setattr(importlib.import_module(module), name, value)


class LossConfig:
    """The thresholds of prime-rl's default loss."""

    dppo_mask_high = dppo_mask_low = 0.2


def write_prime_rl(rows: list[dict[str, Any]], step: int, folder: Path) -> dict[str, float]:
    """Write a step with two ranks, two packed micro-batches each, and padding at their ends."""
    replace("prime_rl.configs.trainer", DefaultLossConfig=LossConfig)
    compute_importance_ratio_and_mismatch_kl = own(
        "prime_rl.trainer.rl.loss", "compute_importance_ratio_and_mismatch_kl"
    )
    TokenExporter = own("prime_rl.trainer.rl.token_export", "TokenExporter")
    kls = []
    exporters = [TokenExporter(folder, rank) for rank in range(2)]
    for rank, exporter in enumerate(exporters):
        for micro in range(2):
            packed = rows[rank * 4 + micro * 2 : rank * 4 + micro * 2 + 2]
            lengths = [len(row["prompt"]) + len(row["response"]) for row in packed]
            joined: dict[str, list[Any]] = {name: [] for name in ("ids", "mask", "mu", "pi", "advantages", "names")}
            for row in packed:
                before = len(row["prompt"])
                joined["ids"] += row["prompt"] + row["response"]
                joined["mask"] += [0] * before + row["mask"]
                joined["mu"] += [0.0] * before + row["mu"]
                joined["pi"] += [-2.7] * before + row["pi"]
                joined["advantages"] += [row["advantage"]] * (before + len(row["response"]))
                joined["names"] += ["sums"] * (before + len(row["response"]))
            padding = 3
            lengths[-1] += padding
            joined = {name: values + [{"names": ""}.get(name, 0)] * padding for name, values in joined.items()}
            tensor = {name: torch.tensor(values) for name, values in joined.items() if name != "names"}
            batch = {"input_ids": tensor["ids"], "position_ids": torch.arange(len(tensor["ids"])),
                     "loss_mask": tensor["mask"].bool(), "advantages": tensor["advantages"],
                     "inference_logprobs": tensor["mu"], "env_names": joined["names"]}  # fmt: skip
            output = {"logprobs": tensor["pi"], "entropy": -tensor["pi"]}
            exporter.export(step, micro, batch, output, lengths, LossConfig())
            kls.append(compute_importance_ratio_and_mismatch_kl(tensor["pi"], tensor["mu"])[2][tensor["mask"].bool()])
    exporters[0]._pending_stable_dirs |= exporters[1]._pending_stable_dirs
    exporters[0].mark_stable()
    return {"mismatch_kl/all/mean": torch.cat(kls).mean().item()}


def padded(rows: list[dict[str, Any]], name: str, *, before: float) -> torch.Tensor:
    """Return prompt and response of all rows, padded at the end."""
    values = [(row["prompt"] if name == "response" else [before] * len(row["prompt"])) + row[name] for row in rows]
    width = max(map(len, values))
    return torch.tensor([row + [type(row[-1])(PAD)] * (width - len(row)) for row in values])


def write_nemo_rl(rows: list[dict[str, Any]], step: int, folder: Path) -> dict[str, float]:
    """Write a step as `grpo.py` does."""
    replace("nemo_rl.data.multimodal_utils", PackedTensor=LossConfig)  # any class
    calculate_kl = own("nemo_rl.algorithms.utils", "calculate_kl")
    masked_mean = own("nemo_rl.algorithms.utils", "masked_mean")
    Logger = own("nemo_rl.utils.logger", "Logger")
    logger = Logger.__new__(Logger)
    logger.base_log_dir, logger.gpu_monitor = str(folder), None
    mask, mu, pi = (padded(rows, name, before=0) for name in ("mask", "mu", "pi"))
    advantages = torch.tensor([row["advantage"] for row in rows])[:, None].expand(mask.shape)
    data = {
        "content": ["text"] * len(rows),
        "rewards": [row["reward"] for row in rows],
        "input_lengths": [len(row["prompt"]) + len(row["response"]) for row in rows],
        "token_ids": padded(rows, "response", before=0).tolist(),
        "token_loss_mask": mask.tolist(),
        "sample_loss_mask": torch.ones(len(rows)).tolist(),
        "advantages": advantages.tolist(),
        "generation_logprobs": mu.tolist(),
        "prev_logprobs": pi.tolist(),
    }
    logger.log_batched_dict_as_jsonl(data, f"train_data_step{step}.jsonl")
    kl = calculate_kl(mu, pi, kl_type="k3", input_clamp_value=None, output_clamp_value=None)
    error = torch.exp(torch.abs(mu - pi) * mask)
    return {"gen_kl_error": masked_mean(kl, mask).item(), "token_mult_prob_error": masked_mean(error, mask).item()}


def samples_of(rows: list[dict[str, Any]], kind: Any, step: int) -> list[Any]:
    """Return the rollouts as samples of slime or miles."""
    groups = sorted({row["group"] for row in rows})
    return [
        kind(group_index=groups.index(row["group"]), index=step * ROLLOUTS + index, prompt="text", response="text",
             tokens=row["prompt"] + row["response"], response_length=len(row["response"]), loss_mask=row["mask"],
             reward=row["reward"], rollout_log_probs=row["mu"], weight_versions=[str(step)],
             status=kind.Status.COMPLETED, metadata={"source": "sums"})
        for index, row in enumerate(rows)
    ]  # fmt: skip


def train_data_of(rows: list[dict[str, Any]], step: int, chosen: list[int]) -> dict[str, Any]:
    """Return what the training actor of slime or miles holds for the chosen rollouts."""
    own = [rows[index] for index in chosen]
    return {
        "tokens": [torch.tensor(row["prompt"] + row["response"]) for row in own],
        "response_lengths": [len(row["response"]) for row in own],
        "total_lengths": [len(row["prompt"]) + len(row["response"]) for row in own],
        "loss_masks": [torch.tensor(row["mask"], dtype=torch.int32) for row in own],
        "rollout_log_probs": [torch.tensor(row["mu"]) for row in own],
        "log_probs": [torch.tensor(row["pi"]) for row in own],
        "ref_log_probs": [torch.tensor(row["pi"]) - 1 for row in own],
        "kl": [torch.full((len(row["response"]),), 0.7) for row in own],
        "advantages": [torch.full((len(row["response"]),), row["advantage"]).bfloat16() for row in own],
        "rewards": [row["advantage"] for row in own],
        "raw_reward": [row["reward"] for row in rows],
        "truncated": [0] * len(own),
        "sample_indices": [step * ROLLOUTS + index for index in chosen],
    }


def write_slime(rows: list[dict[str, Any]], step: int, folder: Path) -> dict[str, float]:
    """Write rollouts and the training data of one data-parallel rank."""
    save_debug_rollout_data = own("slime.observability.rollout_data_utils", "save_debug_rollout_data")
    save_debug_train_data = own("slime.observability.train_data_utils", "save_debug_train_data")
    Sample = own("slime.utils.types", "Sample")
    mpu = own("megatron.core", "mpu")
    mpu.get_tensor_model_parallel_rank = mpu.get_context_parallel_rank = lambda: 0
    mpu.get_data_parallel_rank = lambda with_context_parallel: 0
    mpu.get_data_parallel_world_size = lambda with_context_parallel: 1
    mpu.get_data_parallel_src_rank = lambda with_context_parallel: 0
    replace("slime.backends.megatron_utils.cp_utils", all_gather_with_cp=lambda value, *_: value)
    replace("torch.distributed", get_rank=lambda: 0)
    save_debug_rollout_data(f"{folder}/rollout_data/{{rollout_id}}.pt", samples_of(rows, Sample, step), rollout_id=step,
                            evaluation=False)  # fmt: skip
    order = [5, 0, 3, 1, 7, 2, 6, 4]
    data = {
        **train_data_of(rows, step, order),
        "partition": order,
        "micro_batch_indices": [[0, 1]],
        "num_microbatches": [1],
    }
    arguments = Namespace(save_debug_train_data=f"{folder}/train_data/{{rollout_id}}.pt")
    save_debug_train_data(arguments, rollout_id=step, rollout_data=data)
    return {}


def write_miles(rows: list[dict[str, Any]], step: int, folder: Path) -> dict[str, float]:
    """Write rollouts, and training data of two data-parallel ranks, twice each as under tensor parallelism."""
    save_debug_rollout_data = own("miles.ray.rollout.debug_data", "save_debug_rollout_data")
    save_debug_train_data_for_rank = own("miles.utils.train_dump_utils", "save_debug_train_data_for_rank")
    Sample = own("miles.utils.types", "Sample")
    arguments = Namespace(save_debug_rollout_data=f"{folder}/rollout_data/{{rollout_id}}.pt", qkv_format="thd",
                          save_debug_train_data=f"{folder}/train_data/{{rollout_id}}_{{rank}}.pt",
                          save_debug_trajectory_data=None)  # fmt: skip
    save_debug_rollout_data(arguments, samples_of(rows, Sample, step), step, evaluation=False)
    shutil.rmtree(folder / "dashboard_columns", ignore_errors=True)
    for rank in range(4):
        data = train_data_of(rows, step, [0, 3, 4, 6] if rank < 2 else [1, 2, 5, 7])
        save_debug_train_data_for_rank(arguments, rollout_id=step, rollout_data=data, rank=rank)
    return {}


def write_skyrl(rows: list[dict[str, Any]], step: int, folder: Path) -> dict[str, float]:
    """Write a step as the trainer does: converted, scored, filled up to a multiple of three rows."""
    TrainingInputBatch = own("skyrl.backends.skyrl_train.training_batch", "TrainingInputBatch")
    pad_training_input_batch = own("skyrl.backends.skyrl_train.training_batch", "pad_training_input_batch")
    compute_prompt_boundaries = own("skyrl.train.dataset.preprocess", "compute_prompt_boundaries")
    convert_prompts_responses_to_batch_tensors = own(
        "skyrl.train.dataset.preprocess", "convert_prompts_responses_to_batch_tensors"
    )
    sequences, attention, responses, _, loss_mask, mu, _ = convert_prompts_responses_to_batch_tensors(
        PAD, [row["prompt"] for row in rows], [row["response"] for row in rows],
        [[0.0] * (len(row["response"]) - 1) + [row["reward"]] for row in rows],
        [row["mask"] for row in rows], [row["mu"] for row in rows])  # fmt: skip
    width = responses.shape[1]
    pi = torch.tensor([[0.0] * (width - len(row["pi"])) + row["pi"] for row in rows])
    tensors = {"sequences": sequences, "attention_mask": attention, "response_mask": responses, "loss_mask": loss_mask}
    batch = TrainingInputBatch({**tensors, "rollout_logprobs": mu, "rollout_expert_indices": None})
    batch.metadata = {"policy_prompt_boundaries": compute_prompt_boundaries([row["group"] for row in rows])}
    batch = pad_training_input_batch(batch, -len(rows) % 3)
    fill = -len(rows) % 3
    batch["action_log_probs"] = torch.cat([pi, pi[[0] * fill]])
    batch["base_action_log_probs"] = batch["action_log_probs"] - 1
    batch["kl"] = torch.full_like(batch["action_log_probs"], 0.7)
    advantages = torch.tensor([row["advantage"] for row in rows])[:, None] * responses
    batch["advantages"] = torch.cat([advantages, advantages[[0] * fill]]).bfloat16()
    batch.metadata["metrics"] = {"avg_final_rewards": sum(row["reward"] for row in rows) / len(rows), "avg_kl": 0.7}
    (folder / "dumped_data").mkdir(parents=True, exist_ok=True)
    batch.save(str(folder / "dumped_data" / f"global_step_{step}_training_input.pkl"))
    real = batch["loss_mask"] > 0
    difference = (batch["rollout_logprobs"][real] - batch["action_log_probs"][real]).abs()
    return {"policy/rollout_train_logprobs_abs_diff_mean": difference.mean().item()}


WRITERS = {
    "prime-rl": ("prime-rl/src", write_prime_rl), "nemo-rl": ("RL", write_nemo_rl), "slime": ("slime", write_slime),
    "miles": ("miles", write_miles), "skyrl": ("SkyRL", write_skyrl),
}  # fmt: skip


def main() -> None:
    """Write the dumps of all frameworks and the figures."""
    checkouts = Path(sys.argv[1]).resolve()
    absent = Absent()
    sys.meta_path.insert(0, absent)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name, (source, write) in WRITERS.items():
        sys.path.insert(0, str(checkouts / source))
        shutil.rmtree(DUMPS / name, ignore_errors=True)
        for step in STEPS:
            figures.setdefault(name, {})[str(step)] = write(lists(rollouts_of(step)), step, DUMPS / name)
    (DUMPS / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print("replaced by empty modules:", ", ".join(sorted(absent.made)))


if __name__ == "__main__":
    main()
