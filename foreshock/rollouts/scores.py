"""Results for a set of rollouts: the log-probs of one scorer."""

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
