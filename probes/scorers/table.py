"""The scorers by name. To add one: write its function in a file of this folder and give it a line here."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from probes.scorers.request import Report, Scored, ScoreRequest, UnsupportedScoreError, WarmModel

__all__ = ["ENGINES", "SCORERS", "Engine", "Scorer", "available_scorers", "scorer_named"]

ScoreFunction = Callable[[ScoreRequest, WarmModel, Report], Scored]


@dataclass(frozen=True, slots=True)
class Engine:
    """What a scorer runs in: a process of its own. `packages` must be installed.

    `process_per_weights`: new weights mean a new process, because this engine can only reload weights in place, and a
    reload may leave a part of the old ones behind.
    """

    name: str
    packages: tuple[str, ...]
    process_per_weights: bool


@dataclass(frozen=True, slots=True)
class Scorer:
    """A scorer: its name, its engine, and where its function is (`module:function`, imported in the engine only)."""

    name: str
    engine: str
    function: str

    def load(self) -> ScoreFunction:
        """The scorer's function; call it in the engine's process only."""
        module, _, function = self.function.partition(":")
        found: ScoreFunction = getattr(importlib.import_module(module), function)
        return found


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("vllm", packages=("vllm",), process_per_weights=True),
        Engine("torch", packages=("torch", "transformers"), process_per_weights=False),
    )
}

SCORERS: dict[str, Scorer] = {
    scorer.name: scorer
    for scorer in (
        Scorer("vllm.prefill", "vllm", "probes.scorers.vllm_prefill:score"),
        Scorer("torch.trainer", "torch", "probes.scorers.torch_forward:score_as_trainer"),
        Scorer("torch.bfloat16", "torch", "probes.scorers.torch_forward:score_in_bfloat16"),
        Scorer("torch.float32", "torch", "probes.scorers.torch_forward:score_in_float32"),
    )
}


def available_scorers() -> tuple[str, ...]:
    """The scorers whose engine is installed on this machine."""
    installed = {
        engine.name
        for engine in ENGINES.values()
        if all(importlib.util.find_spec(package) is not None for package in engine.packages)
    }
    return tuple(name for name, scorer in SCORERS.items() if scorer.engine in installed)


def scorer_named(name: str) -> Scorer:
    """The scorer of that name; raises UnsupportedScoreError where there is none."""
    try:
        return SCORERS[name]
    except KeyError:
        raise UnsupportedScoreError(f"there is no scorer {name!r}; the scorers are {', '.join(SCORERS)}") from None
