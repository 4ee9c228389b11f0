"""The scorer `torch.float64`: a forward pass in double precision, one rollout at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreshock.scorers import Scorer

if TYPE_CHECKING:
    from foreshock_probes.scorers.request import Report, Scored, ScoreRequest, WarmModel

ROW = Scorer(
    name="torch.float64",
    title="a torch forward pass in double precision",
    colour=6,
    engine="torch",
    implementation="foreshock_float64:score",
    by_default=False,
)


def score(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Return the log-probs of all response tokens. Torch is imported here: services read the row without it."""
    import numpy as np
    import torch

    from foreshock_probes.scorers.forward_pass import load_model
    from foreshock_probes.scorers.request import Scored, score_fingerprint
    from foreshock_probes.scorers.sampling import divisors
    from foreshock_probes.scorers.tokens import check_tokens, sequence

    rollouts, device = request.rollouts, torch.device("cpu")
    check_tokens(rollouts, request.weights_folder)
    temperature = divisors(rollouts)
    model = warm.get(
        (request.weights_digest, "float64"), lambda: load_model(request.weights_folder, torch.float64, "eager", device)
    )
    log_probs = np.full(rollouts.num_tokens, np.nan, dtype=np.float32)
    for row in range(rollouts.num_rollouts):
        ids = torch.from_numpy(sequence(rollouts, row).astype(np.int64))
        count = min(int(np.diff(rollouts.response_offsets)[row]), ids.numel() - 1)
        if count > 0:
            with torch.no_grad():
                logits = model(input_ids=ids[None], use_cache=False).logits[0, -count - 1 : -1] / temperature[row]
            found = logits.log_softmax(-1).gather(-1, ids[-count:, None])[:, 0]
            stop = int(rollouts.response_offsets[row + 1])
            log_probs[stop - count : stop] = found.float().numpy()
        report(int(rollouts.response_offsets[row + 1]))
    fingerprint = score_fingerprint(
        request,
        "torch",
        device,
        flags={},
        dtype="float64",
        head_dtype="float64",
        attention_backend="eager",
        batch_composition="1 row in order",
        temperature=float(temperature[0]) if np.unique(temperature).size == 1 else None,
    )
    return Scored(log_probs=log_probs, fingerprint=fingerprint)
