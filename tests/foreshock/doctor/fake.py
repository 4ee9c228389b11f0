"""An experimenter without a model: its logits follow from token, position and change."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.doctor import CannotTryError, Change, Subject
from foreshock.rollouts import RolloutBatch

VOCABULARY = 12
ROUNDING = {"bfloat16": 0.02, "autocast": 0.01, "float32": 0.0}


class FakeExperimenter:
    """Random logits for each weights; a precision adds its own small noise, and other batches a smaller one."""

    def __init__(self, batch: RolloutBatch, weights: tuple[str, ...] = ("step_10", "step_7")) -> None:
        self.batch = batch
        self.subject = Subject(
            announced={"rollout": weights[0], "trainer": weights[0]},
            weights=weights,
            configurations={name: {"rope_parameters": {"rope_theta": 1e4}} for name in weights},
            versions={name: int(name.partition("_")[2]) for name in weights},
            longest=16,
            ends=(1,),
        )
        self.check: Callable[[], None] = lambda: None
        self.made: list[Change] = []
        self.size_of_positions = 1.0
        self.sizes_of_compositions = {"other": 0.002, "decode": 0.002}
        self.quantises = False
        """Whether numbers can be quantised on the way, which makes the noise of a precision eight times as large."""

    def logits(self, change: Change, rows: tuple[int, ...] = ()) -> NDArray[np.float32]:
        """Return the logits of `change`, of all rollouts or of `rows`."""
        if rows:
            inside = np.repeat(np.isin(np.arange(self.batch.num_rollouts), rows), self.batch.response_lengths)
            return self.logits(change)[inside]
        self.made.append(change)
        known = {"weights", "precision", "composition", "positions", *(("quantise", "activations") * self.quantises)}
        if set(dict(change.values)) - known:
            raise CannotTryError("the fake has no such change")
        found = self._random(0, change.get("weights")) * 2.0
        times = 8.0 if change.get("activations") else 1.0
        found += times * ROUNDING.get(change.get("precision"), 0.03) * self._random(1, change.get("precision"))
        if kind := change.get("quantise"):
            found += self._random(4, f"{kind} {change.get('activations')}")
        if change.get("positions"):
            found += self.size_of_positions * self._random(2, change.get("positions"))
        if kind := change.get("composition"):
            found += self.sizes_of_compositions[kind] * self._random(3, change.get("precision"))
        return found.astype(np.float32)

    def log_probs(self, engine: str) -> NDArray[np.float32]:
        """Refuse, in the words of an engine."""
        raise CannotTryError(f"{engine} is refused")

    def _random(self, kind: int, name: Any) -> NDArray[np.float64]:
        seed = [kind, *str(name).encode()]
        return np.random.default_rng(seed).normal(size=(self.batch.num_tokens, VOCABULARY))


def logged(experimenter: FakeExperimenter, temperature: float = 1.0, **change: Any) -> NDArray[np.float32]:
    """Return the log-probs that a side logs which computes with `change`."""
    values = {"weights": "step_10", "precision": "bfloat16"} | change
    logits = experimenter.logits(Change.of(**values)).astype(np.float64) / temperature
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    ids = experimenter.batch.response_token_ids
    found: NDArray[np.float32] = logits[np.arange(ids.size), ids].astype(np.float32)
    return found


def rollouts(seed: int = 0, number: int = 32, of_each: int = 4, lengths: tuple[int, int] = (6, 14)) -> RolloutBatch:
    """Return rollouts without log-probs, `of_each` prompt."""
    random = np.random.default_rng(seed)
    return RolloutBatch.from_lists(
        [f"r{row}" for row in range(number)],
        [[2, 3, 4]] * number,
        [random.integers(0, VOCABULARY, length).tolist() for length in random.integers(*lengths, number)],
        group_ids=[f"g{row // of_each}" for row in range(number)],
    )
