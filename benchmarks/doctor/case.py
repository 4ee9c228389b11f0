"""A case under construction, and a fault that is injected into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.doctor.lab import PROMPTS, RESPONSES, Pass, Rows, new_model, prompts_of, sample, save, score, updated

LogProbs = list[NDArray[np.float32]]
SEVERAL = ("random", "tied", "moe", "trained", "biases", "gemma")
_ORDINARY = ("bfloat16", "autocast", "float32")
UNTRAINED = ("random", "tied", "moe", "biases", "gemma")


@dataclass
class Case:
    """A batch under construction: the models of both sides, what they log, and the weights that the doctor gets."""

    kind: str
    seed: int
    model: Any
    old: Any
    size: int = 1
    prompts: int = PROMPTS
    responses: int = RESPONSES
    rows: Rows = field(default_factory=lambda: Rows([], [], [], []))
    pi: LogProbs = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    engine: Any = None
    """The model whose folder is announced for the engine; None: `model`."""
    resample: Callable[[Case], None] | None = None
    """How a healthy engine samples, if it is not the lab's."""

    @classmethod
    def of(cls, kind: str, seed: int, **fields: Any) -> Case:
        """Return a case whose trainer holds version 10; version 7 is known too. `fields` are of the configuration."""
        model = new_model(kind, seed, **fields)
        return cls(kind, seed, model, updated(model, seed + 1, 0.03))

    def sampled(self, model: Any = None, process: Any = None, dtype: torch.dtype = torch.bfloat16) -> None:
        """Let the engine sample with a model, and the trainer score with the announced one."""
        prompts = prompts_of(self.model, self.seed, self.prompts)
        self.rows = sample(model or self.model, prompts, self.seed, process, dtype, self.responses)
        self.pi = score(self.model, self.rows)

    def rescored(self, how: Pass, model: Any = None, side: str = "trainer") -> None:
        """Replace a side's logged values by those of another pass over the same tokens."""
        if side == "rollout" and how.precision == "autocast":
            how.precision = "bfloat16"
        self.log(side, score(model or self.model, self.rows, how))

    def log(self, side: str, values: LogProbs) -> None:
        """Replace a side's logged values."""
        if side == "trainer":
            self.pi = values
        else:
            self.rows.mu = values

    def logged(self, side: str) -> LogProbs:
        """Return a side's logged values."""
        return self.pi if side == "trainer" else self.rows.mu

    def is_within_rounding(self, side: str) -> bool:
        """Whether what was injected on `side` moves its log-probs by no more than rounding does, by the truth alone.

        Its size is the mean of d²/2 between the logged values and those of the right model in the side's precision. It
        is within rounding if the right model's precisions differ as much over the same tokens, or if a healthy engine
        of the same seed differs from its own model by a tenth of it: the true cause explains less than nine tenths.
        """
        right = [np.concatenate(score(self.model, self.rows, Pass(each))) for each in _ORDINARY]
        own = right[_ORDINARY.index("bfloat16" if side == "rollout" else "autocast")]
        moved = _half_square(np.concatenate(self.logged(side)), own)
        largest = max(_half_square(*pair) for pair in combinations(right, 2))
        if moved <= largest:
            return True
        if side == "trainer":
            return False  # the same pass over the same rows gives the same values
        control = replace(self)
        if self.resample is None:
            control.sampled()
        elif moved > 10 * largest:
            return False  # no engine has to be started for a fault that large
        else:
            self.resample(control)
        scored = np.concatenate(score(control.model, control.rows, Pass("bfloat16")))
        return _half_square(np.concatenate(control.rows.mu), scored) > 0.1 * moved

    def folders(self, root: Path) -> tuple[Path, Path, Path]:
        """Save and return the folders of the engine, of the trainer, and of version 7."""
        trainer = save(self.model, root / "step_0010")
        engine = trainer if self.engine is None else save(self.engine, root / "engine" / "step_0010")
        return engine, trainer, save(self.old, root / "step_0007")


def _half_square(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float(np.mean((one.astype(np.float64) - other) ** 2)) / 2


@dataclass(frozen=True)
class Fault:
    """A fault: `inject` applies it to a case that has already sampled; `causes` are the right names, on `side`.

    `values`: for each size, the numbers that the finding must give, by the words before them. `rollouts`: for each
    size, the numbers of prompts and of responses to each.
    """

    name: str
    side: str
    causes: tuple[str, ...]
    inject: Callable[[Case], None]
    kinds: tuple[str, ...] = SEVERAL
    values: tuple[dict[str, float], ...] = ({}, {}, {})
    rollouts: tuple[tuple[int, int], ...] = ((PROMPTS, RESPONSES),) * 3
