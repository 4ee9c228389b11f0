"""Temperature and truncation of logits, as engines apply them when they sample."""

from __future__ import annotations

import torch

from foreshock_probes.scorers.sampling import LoggedDistribution

__all__ = ["LogitProcessing"]


class LogitProcessing:
    """Processes float32 logits as `distribution`, whose rows are those of the logits, in vLLM's order.

    The order is temperature, min-p, top-k, top-p. A token that is as probable as the last one kept is kept by top-k.
    """

    def __init__(self, distribution: LoggedDistribution, device: torch.device) -> None:
        self._temperature = torch.from_numpy(distribution.temperature).to(device, torch.float32)
        self._log_min_p = torch.from_numpy(distribution.min_p).to(device, torch.float32).log()
        self._top_k = torch.from_numpy(distribution.top_k).to(device)
        self._top_p = torch.from_numpy(distribution.top_p).to(device, torch.float32)
        self._scales = bool((distribution.temperature != 1).any())
        self._truncates = bool(distribution.truncated.any())

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the processed logits [n, V] of `rows` [n]; removed tokens have −∞."""
        if self._scales:
            logits = logits / self._temperature[rows, None]
        if not self._truncates:
            return logits
        largest = logits.amax(-1, keepdim=True)
        logits = logits.masked_fill(logits < largest + self._log_min_p[rows, None], -torch.inf)
        ascending, order = torch.sort(logits, dim=-1, stable=True)
        top_k = self._top_k[rows, None]
        vocabulary = logits.shape[-1]
        smallest = ascending.gather(-1, (vocabulary - top_k).clamp(0, vocabulary - 1))
        cut = (ascending < smallest) & (top_k > 0)
        ascending = ascending.masked_fill(cut, -torch.inf)
        below = ascending.softmax(-1).cumsum(-1)
        top_p = self._top_p[rows, None]
        outside = (below <= 1 - top_p) & (top_p < 1)
        outside[:, -1] = False
        return logits.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut | outside), -torch.inf)
