"""Forward passes of trainers for the scorer `torch.own`: a plain FSDP2 loop, and TRL.

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

Forward = Callable[[RolloutBatch], np.ndarray]


def load_fsdp2(weights_folder: Path) -> Forward:
    """Return the forward pass of a loop with FSDP2: float32 weights, computed in bfloat16, in one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not torch.distributed.is_initialized():
        backend, address = "nccl" if device == "cuda" else "gloo", f"file://{tempfile.mkdtemp()}/store"
        torch.distributed.init_process_group(backend, address, rank=0, world_size=1)
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
