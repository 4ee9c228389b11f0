"""Textbook definitions in extended precision, and logits that are hard to reduce."""

import numpy as np
import torch
from numpy.typing import NDArray

DIVERGENCES = ("kl", "reverse_kl", "tv", "chi2", "reverse_chi2", "target_entropy", "behaviour_entropy", "mean_ratio")
COMPUTED = ("kl", "reverse_kl", "tv", "target_entropy", "behaviour_entropy")
Pair = tuple[torch.Tensor, torch.Tensor]


def log_softmax(logits: NDArray[np.longdouble]) -> NDArray[np.longdouble]:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def by_definition(target: torch.Tensor, behaviour: torch.Tensor) -> dict[str, NDArray[np.float64]]:
    """Return each divergence of logits [T, V] by its textbook definition, in 80-bit numbers."""
    rows = [
        _row(a.double().numpy().astype(np.longdouble), b.double().numpy().astype(np.longdouble))
        for a, b in zip(target, behaviour, strict=True)
    ]
    with np.errstate(over="ignore"):
        return {name: np.array([float(row[name]) for row in rows]) for name in DIVERGENCES}


def _row(target: NDArray[np.longdouble], behaviour: NDArray[np.longdouble]) -> dict[str, np.longdouble]:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        log_pi, log_mu = log_softmax(target), log_softmax(behaviour)
        pi, mu = np.exp(log_pi), np.exp(log_mu)
        of_mu, of_pi = np.isfinite(log_mu), np.isfinite(log_pi)
        either = of_mu | of_pi
        apart = pi - mu
        return {
            "kl": (mu * (log_mu - log_pi))[of_mu].sum(), "reverse_kl": (pi * (log_pi - log_mu))[of_pi].sum(),
            "tv": np.abs(pi - mu).sum() / 2, "chi2": (apart / mu * apart)[either].sum(),
            "reverse_chi2": (apart / pi * apart)[either].sum(), "target_entropy": -(pi * log_pi)[of_pi].sum(),
            "behaviour_entropy": -(mu * log_mu)[of_mu].sum(), "mean_ratio": pi[of_mu].sum(),
        }  # fmt: skip


def likeliest(logits: torch.Tensor) -> list[int]:
    """Return the likeliest token of each row; of equal ones the lowest id."""
    return [int(np.argmax(row)) for row in logits.double().numpy()]


def hard_cases(vocabulary: int, rows: int = 3) -> dict[str, Pair]:
    """Return pairs of float32 logits [rows, vocabulary], target and behaviour, by name."""
    seed = torch.Generator().manual_seed(vocabulary)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn((rows, vocabulary), generator=seed) * scale

    def masked(logits: torch.Tensor, share: float = 0.4) -> torch.Tensor:
        # The first token is never masked, so that each row is a valid distribution.
        hidden = torch.rand((rows, vocabulary), generator=seed) < share
        hidden[:, 0] = False
        return logits.masked_fill(hidden, -torch.inf)

    plain = normal(3)
    both_masked = masked(plain)
    ties = torch.randint(0, 3, (rows, vocabulary), generator=seed).float()
    peak = torch.zeros(rows, vocabulary)
    peak[:, vocabulary // 2] = 60.0
    wide = torch.rand((rows, vocabulary), generator=seed) * 1e4 - 5e3
    disjoint = torch.arange(vocabulary) % 2 == 0
    cases = {
        "tiny mismatch": (plain + normal(1e-5), plain),
        "ordinary mismatch": (plain + normal(1e-2), plain),
        "great mismatch": (normal(3), plain),
        "shifted by a constant": (plain + 1024.0, plain + normal(1e-3)),
        "bfloat16 logits": ((plain + normal(1e-2)).bfloat16().float(), plain.bfloat16().float()),
        "ties": (ties.roll(1, dims=1), ties),
        "all equal": (torch.zeros(rows, vocabulary), torch.full((rows, vocabulary), 5.0)),
        "a peak against a plain": (peak, torch.zeros(rows, vocabulary)),
        "a plain against a peak": (torch.zeros(rows, vocabulary), peak),
        "nearly certain": (plain + peak / 4, plain + peak / 4 + normal(1e-2)),
        "one token left": (plain.masked_fill(peak == 0.0, -torch.inf), plain),
        "range 1e4": (wide.flip(0), wide),
        "range 1e4, tiny mismatch": (wide + normal(1e-3), wide),
        "both masked": (both_masked + normal(1e-2), both_masked),
        "target masked": (masked(plain), plain + normal(1e-2)),
        "behaviour masked": (plain + normal(1e-2), masked(plain)),
        "each masked apart": (masked(plain), masked(plain)),
        "masked where it was nothing": (wide.masked_fill(wide < -4.95e3, -torch.inf), wide),
        "rising": (torch.linspace(-20, 20, vocabulary).expand(rows, -1) + normal(1e-2), normal(1e-3)),
    }
    if vocabulary > 1:
        cases["disjoint"] = plain.masked_fill(disjoint, -torch.inf), plain.masked_fill(~disjoint, -torch.inf)
    return cases
