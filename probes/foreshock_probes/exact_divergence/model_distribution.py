"""The distribution of a language model of transformers, as the hidden states of its decoder and its head.

A model that changes its logits by more than a bias and a soft cap is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from foreshock_probes.exact_divergence.logit_sources import LogitSource
from foreshock_probes.scorers.forward_pass import head_in, precision
from foreshock_probes.scorers.request import UnsupportedScoreError


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The language-model head: `weight` [V, H], `bias` [V] or None, and the soft cap of its logits or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None


@dataclass(frozen=True, slots=True, eq=False)
class ModelDistribution:
    """The distribution of a causal language model of transformers in evaluation mode, at `temperature`.

    `autocast`: the dtype of mixed precision as in a trainer, for example bfloat16 over float32 weights. `head_dtype`:
    a dtype of its own for the head.
    """

    model: Any
    temperature: float = 1.0
    autocast: torch.dtype | None = None
    head_dtype: torch.dtype | None = None

    @property
    def states_dtype(self) -> torch.dtype:
        """The dtype of the product of states and head."""
        own: torch.dtype = head_of(self.model).weight.dtype
        return self.head_dtype or self.autocast or own

    def source(self, hidden: torch.Tensor) -> LogitSource:
        """Return the logits of the states `hidden` [T, H]."""
        head = head_of(self.model)
        dtype = self.states_dtype
        bias = None if head.bias is None else head.bias.to(dtype)
        return LogitSource(hidden.to(dtype), head.weight.to(dtype), bias, self.temperature, head.softcap)

    def hidden(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the hidden states to which the head is applied, shape [rows, time, H].

        `positions` [rows, time] None: 0, 1, … in each row.
        """
        named = {} if positions is None else {"position_ids": positions}
        with precision(ids.device, self.autocast):
            states: torch.Tensor = self.model.get_decoder()(
                input_ids=ids, attention_mask=mask, use_cache=False, **named
            ).last_hidden_state
        return states

    def check(self, ids: torch.Tensor) -> None:
        """Raise UnsupportedScoreError if the model is in training mode or if its own logits of `ids` [1, time] differ
        from hidden states times head."""
        if self.model.training:
            raise UnsupportedScoreError(
                "the model is in training mode, in which dropout changes its distribution; call model.eval() first"
            )
        with precision(ids.device, self.autocast), head_in(self.model, self.head_dtype):
            own = self.model(input_ids=ids, use_cache=False).logits[0].double()
        source = self.source(self.hidden(ids)[0])
        found = source.logits(0, source.tokens)
        # Two units in the last place of half precision; at least the difference of float32 products of other shapes.
        digits = max(2 * torch.finfo(source.dtype).eps, 1e-3)
        # Logits of NaN or infinite weights say nothing about the head; their tokens are counted later.
        found, own = found.double()[own.isfinite()], own[own.isfinite()]
        tolerance = digits * (float(own.abs().max()) + 1.0) / self.temperature if own.numel() else 0.0
        if not torch.allclose(found, own / self.temperature, rtol=0.0, atol=tolerance):
            raise UnsupportedScoreError(
                "the model changes its logits after the head by more than a bias and a soft cap (such as a scale); "
                "such models are not supported"
            )


def head_of(model: Any) -> Head:
    """Return the head of a causal language model of transformers. The head may be tied to the embeddings."""
    head = model.get_output_embeddings()
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return Head(head.weight, getattr(head, "bias", None), softcap)
