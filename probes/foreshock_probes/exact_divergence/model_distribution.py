"""Exact divergences of two language models of transformers at the states of real rollouts.

The models' decoders compute the hidden states of a few rollouts at a time; the heads are applied one block of the
vocabulary at a time. A model that changes its logits by more than a bias and a soft cap is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreshock.rollouts import RolloutBatch
from foreshock_probes.exact_divergence.divergences import ExactDivergences, exact_divergences
from foreshock_probes.exact_divergence.logit_sources import LogitSource
from foreshock_probes.scorers.forward_pass import TokenBatch, head_in, precision
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

    def check_tokens(self, rollouts: RolloutBatch) -> None:
        """Raise UnsupportedScoreError if a token is not in the vocabulary; on a GPU it would crash the process."""
        size = self.model.get_input_embeddings().weight.shape[0]
        for column in ("prompt_token_ids", "response_token_ids"):
            largest = int(getattr(rollouts, column).max(initial=0))
            if largest >= size:
                raise UnsupportedScoreError(
                    f"`{column}` has the id {largest}, and the model's vocabulary has only {size}"
                )


def head_of(model: Any) -> Head:
    """Return the head of a causal language model of transformers. The head may be tied to the embeddings."""
    head = model.get_output_embeddings()
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return Head(head.weight, getattr(head, "bias", None), softcap)


def exact_divergences_of_models(
    target: ModelDistribution,
    behaviour: ModelDistribution,
    rollouts: RolloutBatch,
    *,
    batch_size: int = 16,
) -> ExactDivergences:
    """Return the divergences [T] of π (`target`) and μ (`behaviour`) at the state before each response token.

    Both log-probs of each response token are included. The order is that of the rollouts' response columns.
    A model gets `batch_size` rollouts at once, padded to the longest. Raises UnsupportedScoreError if a rollout has no
    prompt (nothing precedes its first token) or a model changes its logits after the head, and SourceError if
    the vocabularies differ.
    """
    prompts = np.diff(rollouts.prompt_offsets)
    if not prompts.size:
        raise UnsupportedScoreError("there are no rollouts")
    if (prompts == 0).any():
        raise UnsupportedScoreError(
            f"rollout {int(np.flatnonzero(prompts == 0)[0])} has no prompt; at least 1 token is needed"
        )
    for distribution in (target, behaviour):
        distribution.check_tokens(rollouts)
    with torch.no_grad():
        pairs = zip(_states(target, rollouts, batch_size), _states(behaviour, rollouts, batch_size), strict=True)
        parts = [
            exact_divergences(target.source(of_target), behaviour.source(of_behaviour), token_ids=ids)
            for (of_target, ids), (of_behaviour, _) in pairs
        ]
    return ExactDivergences.concatenate(parts)


def _states(
    distribution: ModelDistribution, rollouts: RolloutBatch, batch_size: int
) -> Iterator[tuple[torch.Tensor, NDArray[np.int64]]]:
    """Yield, for each batch of rollouts, the states [n, H] before the response tokens and these tokens [n]."""
    for start in range(0, rollouts.num_rollouts, batch_size):
        rows = np.arange(start, min(start + batch_size, rollouts.num_rollouts))
        batch = TokenBatch(rollouts, rows, "right", head_of(distribution.model).weight.device)
        if start == 0:
            distribution.check(batch.ids[:1, : int(batch.lengths[0])][:, :8])
        ids: NDArray[np.int64] = batch.ids[:, 1:][batch.needed].cpu().numpy()
        yield distribution.hidden(batch.ids, batch.mask)[:, :-1][batch.needed], ids
