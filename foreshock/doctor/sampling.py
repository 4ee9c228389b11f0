"""Sampling distributions computed from logits, in the order of vLLM: penalties, bias, temperature, min-p, top-k, top-p.

Logits are [T, V] in float32, log-probs [T] in nats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.doctor.evidence import Compared, Float64

_LOGITS_AT_ONCE = 1 << 24
"""Logits that are converted to float64 at a time: with 150,000 ids a replay of one rollout may have more."""


@dataclass(frozen=True, slots=True, eq=False)
class Sampling:
    """The changes of logits before log-softmax; `temperature` to `min_p` may differ by token, [T].

    `repetition` counts the ids of prompt and response, as in vLLM and transformers, `repetition_of_response` those of
    the response only, as in SGLang; presence and frequency count those of the response in all these engines. `biases`:
    pairs of token id and what is added to its logit, −∞ for a banned id. `banned_until`: ids (the ends of a sequence)
    that are banned at the first n response tokens. `softcap` c is c · tanh(l / c), `softcap_product` l · tanh(l / c).
    `largest`: the log-prob is that of the likeliest id.
    """

    temperature: Any = 1.0
    top_p: Any = 1.0
    top_k: Any = 0
    min_p: Any = 0.0
    repetition: float = 1.0
    repetition_of_response: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    biases: tuple[tuple[int, float], ...] = ()
    banned_until: tuple[tuple[int, ...], int] | None = None
    softcap: float = 0.0
    softcap_product: float = 0.0
    largest: bool = False

    def having(self, name: str, value: Any) -> Sampling:
        """Return the distribution with another value of one parameter."""
        changed: dict[str, Any] = {name: value}
        return replace(self, **changed)

    def at(self, tokens: NDArray[np.int64]) -> Sampling:
        """Return the distribution of some of the tokens."""
        found = self
        for name in ("temperature", "top_p", "top_k", "min_p"):
            if isinstance(value := getattr(self, name), np.ndarray):
                found = found.having(name, value[tokens])
        return found

    def log_probs(self, logits: NDArray[np.float32], compared: Compared) -> Float64:
        """Return the log-prob [T] of each token of `compared`; −∞ where it is banned."""
        tokens, vocabulary = logits.shape
        size = max(1, _LOGITS_AT_ONCE // vocabulary)
        parts = [np.arange(start, min(start + size, tokens)) for start in range(0, tokens, size)]
        if len(parts) < 2:
            return self._log_probs(logits, compared)
        return np.concatenate([self.at(part)._log_probs(logits[part], compared.at(part)) for part in parts])

    def _log_probs(self, logits: NDArray[np.float32], compared: Compared) -> Float64:
        values, rows = self.shaped(logits, compared), np.arange(logits.shape[0])
        probabilities = np.exp(values)
        total = probabilities.sum(axis=1)
        own = values[rows, values.argmax(axis=1) if self.largest else compared.ids]
        if not self.truncates:
            return np.asarray(own - np.log(total))
        return np.asarray(own - np.log(total * self._kept(probabilities / total[:, None], compared.ids)))

    def shaped(self, logits: NDArray[np.float32], compared: Compared) -> Float64:
        """Return the logits [T, V] before truncation, less the largest of each token."""
        values = self._penalised(logits.astype(np.float64), compared)
        if self.biases:
            ids, biases = zip(*self.biases, strict=True)
            values[:, list(ids)] += np.array(biases)
        if self.banned_until is not None:
            ids, first = self.banned_until
            values[np.ix_(np.flatnonzero(compared.position < first), np.array(ids))] = -np.inf
        values /= np.broadcast_to(np.asarray(self.temperature, np.float64), values.shape[:1])[:, None]
        return np.asarray(values - values.max(axis=1, keepdims=True))

    @property
    def truncates(self) -> bool:
        """Whether top-p, top-k or min-p leave out tokens."""
        return bool(np.any(np.asarray(self.top_p) < 1) or np.any(np.asarray(self.top_k) > 0) or np.any(self.min_p))

    def _penalised(self, values: Float64, compared: Compared) -> Float64:
        if self.softcap:
            values = self.softcap * np.tanh(values / self.softcap)
        if self.softcap_product:
            values = values * np.tanh(values / self.softcap_product)
        for factor, with_prompt in ((self.repetition, True), (self.repetition_of_response, False)):
            if factor != 1.0:
                seen = compared.counts(values.shape[1], with_prompt=with_prompt) > 0
                values = np.where(seen, np.where(values > 0, values / factor, values * factor), values)
        if self.presence or self.frequency:
            counts = compared.counts(values.shape[1], with_prompt=False)
            values = values - self.presence * (counts > 0) - self.frequency * counts
        return values

    def _kept(self, probabilities: Float64, ids: NDArray[np.int32]) -> Float64:
        """Return the mass [T] that truncation keeps; the sampled token is always kept, even against rounding."""
        rows = np.arange(ids.size)
        ordered = -np.sort(-probabilities, axis=1)
        running = np.cumsum(ordered, axis=1)
        width = ordered.shape[1]
        top_k = np.broadcast_to(np.asarray(self.top_k), rows.shape)
        kept = np.where(top_k > 0, np.minimum(top_k, width), width)
        min_p = np.broadcast_to(np.asarray(self.min_p), rows.shape)[:, None]
        kept = np.minimum(kept, (ordered >= min_p * ordered[:, :1]).sum(axis=1))
        mass = running[rows, kept - 1]
        top_p = np.broadcast_to(np.asarray(self.top_p), rows.shape)
        nucleus = ((running - ordered) < (top_p * mass)[:, None]).sum(axis=1)
        kept = np.where(top_p < 1, np.minimum(kept, np.maximum(nucleus, 1)), kept)
        rank = (probabilities > probabilities[rows, ids][:, None]).sum(axis=1)
        return np.asarray(running[rows, np.maximum(kept, rank + 1) - 1])
