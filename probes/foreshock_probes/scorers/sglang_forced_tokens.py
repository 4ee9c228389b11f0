"""SGLang's custom logit processor for `sglang.decode`. A server gets the text of this file; no worker imports it.

It takes the log-prob of the next logged token from the engine's own logits, as SGLang's sampler would have reported it,
and then leaves this token as the only one. The log-probs come back in the answer's `meta_info`.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    from sglang.kernels.ops.sampling import softmax
except ImportError:

    def softmax(logits: torch.Tensor) -> torch.Tensor:
        """Return what releases without kernels of their own sample from."""
        return torch.softmax(logits, dim=-1)


class ForcedTokens:
    """Parameters of a request: `tokens`, `temperature`, and `log_softmax`, True if the sampler takes log-softmax."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Force the next token of each row of `logits` [rows, vocabulary]."""
        rows, forced, chosen = [], [], []
        for row, parameters in enumerate(custom_param_list or ()):
            place = parameters["place"] = parameters.get("place", -1) + 1
            if place < len(parameters["tokens"]):
                rows.append(row)
                forced.append(parameters["tokens"][place])
                chosen.append(parameters)
        if not rows:
            return logits
        temperatures = torch.tensor([[each["temperature"]] for each in chosen], device=logits.device)
        scaled = logits[rows].float().div(temperatures)
        # The same for all requests: it depends on how the server was started.
        log_softmax = chosen[0]["log_softmax"]
        log_probs = torch.log_softmax(scaled, dim=-1) if log_softmax else torch.log(softmax(scaled))
        # JSON has no infinity.
        values = log_probs[range(len(rows)), forced].clamp(min=-1e30).tolist()
        for parameters, value in zip(chosen, values, strict=True):
            request = parameters["__req__"]
            if request.customized_info is None:
                request.customized_info = {"foreshock_log_probs": []}
            request.customized_info["foreshock_log_probs"].append(value)
        logits[rows] = -float("inf")
        logits[rows, forced] = 0.0
        return logits
