"""One step's rollouts: problems, sampled responses, and the batch that is logged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from examples.tiny_rl.sampler import Response, logprobs_mode
from examples.tiny_rl.task import MAX_RESPONSE_TOKENS, Problem, reward
from examples.tiny_rl.trainer import Update, rloo_advantages
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import BatchAttributes, RolloutBatch


class SamplesResponses(Protocol):
    """What samples responses: vLLM (`Sampler`), or another policy in its place."""

    def sample(self, prompts: Sequence[Sequence[int]], responses_per_prompt: int) -> list[list[Response]]:
        """Return `responses_per_prompt` independent responses to each prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class StepRollouts:
    """G prompts with R responses each; rollout i = prompt i // R, response i % R."""

    step: int
    prompts: list[list[int]]  # G × R
    responses: list[Response]  # G × R
    rewards: NDArray[np.float64]  # [G, R]
    sampled_by: int
    """The version of the weights that sampled: `step` minus the lag."""
    temperature: float

    @property
    def token_ids(self) -> list[list[int]]:
        return [response.token_ids for response in self.responses]

    @property
    def advantages(self) -> NDArray[np.float64]:
        """[G × R]"""
        return rloo_advantages(self.rewards).reshape(-1)

    @property
    def mean_response_length(self) -> float:
        return sum(map(len, self.token_ids)) / len(self.responses)

    def as_batch(self, update: Update, engine: Fingerprint, trainer: Fingerprint) -> RolloutBatch:
        """Return the rollouts as they are logged: log μ of the engine and log π of the trainer, one value per token."""
        responses_per_prompt = self.rewards.shape[1]
        groups = [f"step-{self.step:04d}-prompt-{row // responses_per_prompt}" for row in range(len(self.responses))]
        lengths = [len(response.token_ids) for response in self.responses]
        boundaries = np.cumsum(lengths)[:-1]
        return RolloutBatch.from_lists(
            sample_ids=[f"{group}-{row % responses_per_prompt:02d}" for row, group in enumerate(groups)],
            prompt_token_ids=self.prompts,
            response_token_ids=self.token_ids,
            rollout_log_probs=[np.asarray(response.log_probs, np.float32) for response in self.responses],
            trainer_log_probs=np.split(update.log_probs, boundaries),
            entropy=np.split(update.entropy, boundaries),
            weights_version=[np.full(length, self.sampled_by, np.int32) for length in lengths],
            group_ids=groups,
            reward=self.rewards.reshape(-1).astype(np.float32),
            advantage=self.advantages.astype(np.float32),
            finish_reasons=[response.finish_reason for response in self.responses],
            attributes=BatchAttributes(
                temperature=self.temperature,
                top_p=1.0,
                top_k=-1,
                min_p=0.0,
                logprobs_mode=logprobs_mode(self.temperature),
                trainer_weights_version=self.step,
                trainer_policy="recomputed_old",
                length_cap=MAX_RESPONSE_TOKENS,
                engine_fingerprint=engine,
                trainer_fingerprint=trainer,
            ),
        )


def sample_step(
    step: int,
    sampler: SamplesResponses,
    problems: list[Problem],
    responses_per_prompt: int,
    sampled_by: int | None = None,
    temperature: float = 1.0,
) -> StepRollouts:
    """Sample `responses_per_prompt` responses to each problem and compute their rewards.

    `sampled_by` is the version of the engine's weights, by default `step`.
    """
    groups = sampler.sample([problem.prompt_token_ids for problem in problems], responses_per_prompt)
    return StepRollouts(
        step=step,
        prompts=[problem.prompt_token_ids for problem in problems for _ in range(responses_per_prompt)],
        responses=[response for group in groups for response in group],
        rewards=np.array(
            [
                [reward(problem, response.token_ids) for response in group]
                for problem, group in zip(problems, groups, strict=True)
            ]
        ),
        sampled_by=step if sampled_by is None else sampled_by,
        temperature=temperature,
    )
