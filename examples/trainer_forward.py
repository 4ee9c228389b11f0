"""Forward passes of trainers for the scorer `torch.own`: a plain FSDP2 loop, TRL, and verl's actor.

    FORESHOCK_TRAINER_FORWARD=examples.trainer_forward:load_fsdp2 foreshock worker
    foreshock probe my-run 10 --scorer torch.own --scorer torch.trainer

Each function loads a checkpoint as its trainer does and returns what gives the log-probs of a batch. Replace the bodies
by your trainer's own calls: the point of this scorer is that nothing is set up again.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foreshock.rollouts import RolloutBatch
from foreshock_probes.scorers.tokens import sequences

Forward = Callable[[RolloutBatch], np.ndarray]


def load_fsdp2(weights_folder: Path) -> Forward:
    """Return the forward pass of a loop with FSDP2: float32 weights, computed in bfloat16, in one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    _start_process_group()
    model = AutoModelForCausalLM.from_pretrained(weights_folder, dtype=torch.float32).to(device).eval()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device, (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    def forward(batch: RolloutBatch) -> np.ndarray:
        return _by_rollout(batch, lambda ids: model(input_ids=ids.to(device), use_cache=False).logits[0])

    forward.dtype, forward.master_dtype = "bfloat16", "float32"  # type: ignore[attr-defined]
    return forward


def load_trl(weights_folder: Path) -> Forward:
    """Return the forward pass of TRL's trainer with `bf16=True`: bfloat16 autocast over float32 weights."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(weights_folder, dtype=torch.float32).to(device).eval()

    def logits_of(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits: torch.Tensor = model(input_ids=ids.to(device), use_cache=False).logits[0]
        return logits

    def forward(batch: RolloutBatch) -> np.ndarray:
        return _by_rollout(batch, logits_of)

    forward.master_dtype, forward.autocast = "float32", "bfloat16"  # type: ignore[attr-defined]
    return forward


def load_verl(weights_folder: Path) -> Forward:
    """Return the forward pass of verl's actor: its FSDP engine, which computes in bfloat16 over float32 weights."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    _start_process_group()
    attention = {"attn_implementation": "sdpa"}
    model = HFModelConfig(
        path=str(weights_folder), load_tokenizer=False, use_remove_padding=False, override_config=attention
    )
    engine = FSDPEngineWithLMHead(
        model, FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False), FSDPOptimizerConfig(lr=1e-6), None
    )
    engine.initialize()

    def forward(batch: RolloutBatch) -> np.ndarray:
        rows = [torch.from_numpy(row.astype(np.int64)) for row in sequences(batch, np.arange(batch.num_rollouts))]
        ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        positions = torch.nested.as_nested_tensor([torch.arange(len(row)) for row in rows], layout=torch.jagged)
        data = TensorDict(
            {"input_ids": ids, "position_ids": positions, "loss_mask": torch.ones_like(ids)}, batch_size=len(rows)
        )
        tensordict_utils.assign_non_tensor(
            data, use_remove_padding=False, use_dynamic_bsz=True, max_token_len_per_gpu=16384, temperature=1.0
        )
        with engine.eval_mode():
            found = engine.infer_batch(data)["model_output"]["log_probs"]
        # The log-prob of a token is at the place of the one before it.
        return np.concatenate(
            [
                each[len(each) - 1 - n : len(each) - 1].float().cpu().numpy()
                for each, n in zip(found.unbind(), batch.response_lengths, strict=True)
            ]
        )

    forward.dtype, forward.master_dtype = "bfloat16", "float32"  # type: ignore[attr-defined]
    return forward


def _start_process_group() -> None:
    """Start a process group of this process alone."""
    if not torch.distributed.is_initialized():
        backend, address = "nccl" if torch.cuda.is_available() else "gloo", f"file://{tempfile.mkdtemp()}/store"
        torch.distributed.init_process_group(backend, address, rank=0, world_size=1)


@torch.no_grad()
def _by_rollout(batch: RolloutBatch, logits_of: Callable[[torch.Tensor], Any]) -> np.ndarray:
    """Return the log-probs of the response tokens, [T]: one rollout at a time, log-softmax in float32."""
    found = []
    for row in range(batch.num_rollouts):
        prompt = batch.prompt_token_ids[batch.prompt_offsets[row] : batch.prompt_offsets[row + 1]]
        response = batch.response_token_ids[batch.response_offsets[row] : batch.response_offsets[row + 1]]
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        log_probs = logits_of(ids[None]).float().log_softmax(-1)[len(prompt) - 1 : -1].cpu()
        found.append(log_probs.gather(-1, ids[len(prompt) :, None])[:, 0].numpy())
    return np.concatenate(found)
