"""Evidence from made scores whose true cause is known."""

from __future__ import annotations

import numpy as np

from foreshock.api.attribution import AttributionDocument, EnvironmentRecord
from foreshock.api.records import from_attributes
from foreshock.diagnosis.conclusion import Conclusion
from foreshock.environment import Environment
from foreshock.measures.estimators.attribution import Attribution, attribute
from foreshock.scorers import SCORERS
from tests.foreshock.commands.attributions import attribution_of

TOKENS = 40
CHAIN = ("vllm.prefill", "torch.trainer", "trainer")


def evidence_of(found: Attribution, **changes: object) -> AttributionDocument:
    """Return an attribution as the service stores it."""
    environments = {name: environment_of(name) for name in found.chain}
    return attribution_of(7, found, **{"environments": environments, **changes})


def environment_of(score: str) -> EnvironmentRecord:
    """Return the environment of a score in a run whose replays ran in its own environment."""
    side = SCORERS[score].side
    engine, version = ("vllm", "0.32.0") if side == "engine" else ("torch", "2.13.0")
    return recorded(Environment(device="NVIDIA H200", driver="580.1", engine=engine, engine_version=version))


def recorded(environment: Environment) -> EnvironmentRecord:
    """Return an environment as the service stores it."""
    return from_attributes(EnvironmentRecord, environment, words=environment.describe())


def attributed(
    sizes: tuple[float, float, float], prompts: int = 32, per_prompt: int = 4, seed: int = 0, spread: float = 0.0
) -> Attribution:
    """Return the attribution of a chain whose links are noise of these sizes, in nats.

    `spread` is the log-standard deviation of a prompt's factor on the sizes, drawn for each link.
    """
    generator = np.random.default_rng(seed)
    rollouts = prompts * per_prompt
    score = -generator.exponential(1.0, rollouts * TOKENS) - 2.0
    scores = {"rollout": score}
    for name, size in zip(CHAIN, sizes, strict=True):
        factors = np.repeat(np.exp(generator.normal(0, spread, prompts)), per_prompt * TOKENS)
        score = score + size * factors * generator.standard_normal(rollouts * TOKENS)
        scores[name] = score
    groups = [f"prompt-{row // per_prompt}" for row in range(rollouts)]
    return attribute(scores, np.arange(0, rollouts * TOKENS + 1, TOKENS), None, groups)


def kinds_of(conclusions: tuple[Conclusion, ...]) -> list[str]:
    """Return the kinds of conclusions, in their order."""
    return [each.kind for each in conclusions]
