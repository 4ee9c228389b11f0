"""Results for a set of rollouts: the log-probs of one scorer, and the exact divergences of a pair of scorers."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.fingerprint import Fingerprint


@dataclass(frozen=True, slots=True, eq=False)
class ScoreBatch:
    """One scorer's log-prob for each response token of N rollouts, T tokens in total.

    `log_probs[offsets[i]:offsets[i + 1]]` are those of `sample_ids[i]`, one per response token, tool output included;
    NaN if the scorer gave none. `fingerprint` describes the scorer.
    """

    sample_ids: list[str]  # N, unique in the batch
    log_probs: NDArray[np.float32]  # [T], natural logarithms
    offsets: NDArray[np.int64]  # [N + 1]
    fingerprint: Fingerprint

    @property
    def num_rollouts(self) -> int:
        """N."""
        return len(self.sample_ids)

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.offsets[-1])


@dataclass(frozen=True, slots=True, eq=False)
class ExactBatch:
    """Divergences over the whole vocabulary at the state before each response token of N rollouts, T in total.

    π is the distribution of the pair's target, μ that of its behaviour. Values are NaN at a state without a
    distribution: before the first token of a rollout without a prompt, or if a logit is NaN. A KL is infinite if the
    support of its second distribution does not cover the first.
    """

    sample_ids: list[str]  # N, unique in the batch
    offsets: NDArray[np.int64]  # [N + 1]
    kl: NDArray[np.float32]  # [T], KL(μ‖π) in nats
    reverse_kl: NDArray[np.float32]  # [T], KL(π‖μ) in nats
    tv: NDArray[np.float32]  # [T], total variation ½ Σ|π − μ|, 0 … 1
    top1_flip: NDArray[np.uint8]  # [T], 1 if the likeliest tokens of π and μ differ
    target_entropy: NDArray[np.float32]  # [T], H(π) in nats
    behaviour_entropy: NDArray[np.float32]  # [T], H(μ) in nats
    target_log_probs: NDArray[np.float32]  # [T], log π of the response token
    behaviour_log_probs: NDArray[np.float32]  # [T], log μ of the response token
    target_fingerprint: Fingerprint
    behaviour_fingerprint: Fingerprint

    @property
    def num_rollouts(self) -> int:
        """N."""
        return len(self.sample_ids)

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.offsets[-1])
