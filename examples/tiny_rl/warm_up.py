"""The supervised warm-up: teaches the format and both ways of answering, mostly the short one.

Reinforcement learning starts from the share of worked answers. At a few percent it takes some tens of steps before
worked answers spread and responses grow.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass

import torch
from transformers import Qwen3ForCausalLM

from examples.tiny_rl.policy import next_token_log_probs, pad
from examples.tiny_rl.task import END_OF_SEQUENCE, FEWEST_DIGITS, MOST_DIGITS, Problem, draw_problem, encode

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lesson:
    """A stretch of supervised training at one share of worked answers, with a one-cycle learning rate."""

    steps: int
    worked_share: float
    guessing: bool
    """True: direct answers are guesses, the answer of another problem with as many digits."""
    peak_learning_rate: float
    batch_size: int
    fewest_digits: int = FEWEST_DIGITS
    most_digits: int = MOST_DIGITS


BOTH_WAYS = Lesson(steps=1600, worked_share=0.5, guessing=False, peak_learning_rate=4e-3, batch_size=128)
MOSTLY_GUESSES = Lesson(steps=160, worked_share=0.03, guessing=True, peak_learning_rate=1e-3, batch_size=64)
"""Mostly short and mostly wrong answers. A few worked ones suffice to keep what was learned before."""


def warm_up(model: Qwen3ForCausalLM, lessons: tuple[Lesson, ...], seed: int) -> float:
    """Train in place, lesson after lesson; return the last loss in nats per token."""
    random_source = random.Random(seed)
    return [_teach(model, lesson, random_source) for lesson in lessons][-1]


def _teach(model: Qwen3ForCausalLM, lesson: Lesson, random_source: random.Random) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lesson.peak_learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, lesson.peak_learning_rate, total_steps=lesson.steps, pct_start=0.1, final_div_factor=100
    )
    loss = torch.tensor(float("nan"))
    for step in range(1, lesson.steps + 1):
        batch = pad(*_draw_batch(random_source, lesson))
        # In float32: autocast is ten times slower on a CPU without bfloat16 instructions.
        log_probs, _ = next_token_log_probs(model, batch, autocast=False)
        loss = -log_probs[batch.response_mask].mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            logger.info("warm-up step %d of %d: loss %.4f", step, lesson.steps, loss.item())
    return loss.item()


def _draw_batch(random_source: random.Random, lesson: Lesson) -> tuple[list[list[int]], list[list[int]]]:
    prompts, answers = [], []
    for _ in range(lesson.batch_size):
        problem = draw_problem(random_source, lesson.fewest_digits, lesson.most_digits)
        if random_source.random() < lesson.worked_share:
            text = problem.worked_answer()
        elif lesson.guessing:
            text = Problem(tuple(random_source.randint(0, 9) for _ in problem.digits)).direct_answer()
        else:
            text = problem.direct_answer()
        prompts.append(problem.prompt_token_ids)
        answers.append([*encode(text), END_OF_SEQUENCE])
    return prompts, answers
