"""A run with checkpoints, and probes that are answered with chosen log-probs."""

from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from foreshock.rollouts import RolloutBatch
from tests.service.sending import Sender, start_run
from tests.service.working import LeaseHolder, announce_checkpoint, ask_for_lease, ask_for_probe, scores_of

VERSIONS = {"vllm": "0.32.0", "torch": "2.13.0"}
ON_A_GPU = {"device_name": "NVIDIA H200", "driver": "580.1"}


def start(http: httpx.Client, batch: RolloutBatch, *steps: int) -> Sender:
    """Return a run that logged the batch at each of these steps (none: 1), with their checkpoints."""
    run = start_run(http)
    for step in steps or (1,):
        run.put_shard(step, batch).raise_for_status()
        announce_checkpoint(run, step)
    return run


def replay(
    run: Sender,
    scores: Mapping[str, NDArray[np.float32]],
    batch: RolloutBatch,
    made: Mapping[str, Any] = ON_A_GPU,
    step: int = 1,
    **probe: object,
) -> None:
    """Probe a step and answer with these log-probs, [T] of the batch, by `scorer` or `scorer@variant`.

    `made` has the fields of their fingerprints.
    """
    ask_for_probe(run, step, list(scores), **probe).raise_for_status()
    rows = {sample_id: row for row, sample_id in enumerate(batch.sample_ids)}
    while (answer := ask_for_lease(run.http, environments=["avx2", "amx"])).status_code == 200:
        holder = LeaseHolder(run.http, answer.json())
        part = holder.rollouts()
        for each in holder.lease["job"]["scorers"]:
            name = "@".join(filter(None, (each["scorer"], each["variant"])))
            values = np.concatenate(
                [scores[name][slice(*batch.response_offsets[rows[i] : rows[i] + 2])] for i in part.sample_ids]
            )
            engine = each["scorer"].partition(".")[0]
            body = scores_of(part, values, engine, engine_version=VERSIONS[engine], **made)
            holder.put_scores(body, each["scorer"], variant=each["variant"]).raise_for_status()
        holder.complete().raise_for_status()
