"""Divergences over the whole vocabulary of two distributions given by their logits, in float64."""

import math
from concurrent.futures import ThreadPoolExecutor

import torch

from foreshock_probes.scorers.forward_pass import FLOAT32_BYTES

NAMES = (
    "kl", "reverse_kl", "tv", "target_entropy", "behaviour_entropy", "target_log_probs", "behaviour_log_probs",
    "top1_flip",
)  # fmt: skip
Divergences = dict[str, torch.Tensor]  # by NAMES


def exact_divergences(target: torch.Tensor, behaviour: torch.Tensor, token_ids: torch.Tensor) -> Divergences:
    """Return the divergences of π (`target`) and μ (`behaviour`) from their logits [T, V] on one device, −∞: masked.

    By name, each float64 [T] on the CPU: KL(μ‖π) `kl` and KL(π‖μ) `reverse_kl` in nats, infinite if a support is not
    covered; the total variation `tv`; `target_entropy` and `behaviour_entropy` in nats; the log-probs of `token_ids`
    [T], `target_log_probs` and `behaviour_log_probs`; `top1_flip`, 1 if the likeliest tokens differ (of equally likely
    ones the first counts). A state with a NaN or +∞ logit, or none above −∞, has NaN and no flip.
    """
    size = max(1, FLOAT32_BYTES[target.device.type] // (4 * target.shape[1]))
    starts = range(0, max(target.shape[0], 1), size)
    threads = torch.get_num_threads()
    # A thread a slice: the threads of one operation on a few rows would wait for each other longer than they work.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            slices = ([each[start : start + size] for start in starts] for each in (target, behaviour, token_ids))
            parts = list(pool.map(_of_rows, *slices))
    finally:
        torch.set_num_threads(threads)
    return {name: torch.cat([part[name] for part in parts]) for name in NAMES}


@torch.no_grad()
def _of_rows(target: torch.Tensor, behaviour: torch.Tensor, token_ids: torch.Tensor) -> Divergences:
    log_pi, log_mu = (torch.log_softmax(each.double(), -1) for each in (target, behaviour))
    known = log_pi.amax(-1).isfinite() & log_mu.amax(-1).isfinite()
    d = (log_pi - log_mu).nan_to_num_(0.0, math.inf, -math.inf)  # masked on both sides: −∞ − (−∞)
    pi, mu = log_pi.exp(), log_mu.exp()
    # |π − μ| = max(π, μ)·(1 − e^−|d|), without cancellation.
    distance = torch.maximum(pi, mu).mul_(d.abs().neg_().expm1_().neg_())
    signed = torch.copysign(distance, d)
    finite = torch.where(d.isinf(), 0.0, d)
    # The terms of KL(μ‖π) are π − μ + μ log(μ/π): their sum is the same, and none is negative but by rounding.
    kl = (signed - mu * finite).clamp_min_(0.0).sum(-1).masked_fill_((d == -math.inf).any(-1), math.inf)
    reverse_kl = (pi * finite).sub_(signed).clamp_min_(0.0).sum(-1).masked_fill_((d == math.inf).any(-1), math.inf)
    flips = log_pi.argmax(-1) != log_mu.argmax(-1)
    found = (
        kl,
        reverse_kl,
        (distance.sum(-1) / 2).clamp_max_(1.0),
        -(pi * log_pi.clamp_min(-1e300)).sum(-1),
        -(mu * log_mu.clamp_min(-1e300)).sum(-1),
        log_pi.gather(-1, token_ids[:, None])[:, 0],
        log_mu.gather(-1, token_ids[:, None])[:, 0],
    )
    of_known = (values.masked_fill(~known, math.nan) for values in found)
    return {name: values.cpu() for name, values in zip(NAMES, (*of_known, (flips & known).double()), strict=True)}
