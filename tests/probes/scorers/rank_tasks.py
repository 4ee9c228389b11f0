"""Tasks of ranks for tests; a rank imports them by name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from foreshock.errors import ForeshockError
from foreshock_probes.scorers.rank_processes import Rank
from foreshock_probes.scorers.request import Report
from foreshock_probes.scorers.sharded import load_sharded_model


def count_parameters(rank: Rank, folder: Path, report: Report) -> tuple[int, int, int]:
    """Return the numbers that the rank holds, those of the head, and those of the whole model."""
    from torch.distributed.tensor import DTensor

    model = load_sharded_model(folder, torch.float32, "sdpa", rank.device)
    held = whole = 0
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        assert local.untyped_storage().nbytes() == 4 * local.numel()
        held, whole = held + local.numel(), whole + parameter.numel()
    return held, model.get_output_embeddings().weight.numel(), whole


def act(rank: Rank, task: str, report: Report) -> int:
    """Return the sum of 1 over the ranks; before that, rank 1 does what the task says."""
    if rank.number == 1 and task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank.number == 1 and task == "refuse":
        raise ForeshockError("refused by rank 1")
    if rank.number == 1 and task == "fail":
        raise ValueError("rank 1 cannot do this")
    report(rank.number + 1)
    ones = torch.ones(1)
    torch.distributed.all_reduce(ones)
    return int(ones)
