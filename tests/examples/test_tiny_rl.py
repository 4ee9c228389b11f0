"""The task and trainer: rewards, advantages, the direction of the gradient, and the forward pass of the replay."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from examples.tiny_rl import task
from examples.tiny_rl.model import new_model
from examples.tiny_rl.policy import next_token_log_probs, pad
from examples.tiny_rl.reload_check import regression_slope
from examples.tiny_rl.tokenizer import TOKENIZER, write_tokenizer
from examples.tiny_rl.trainer import Trainer, TrainerOptions, rloo_advantages
from foreshock_service.present.pages.tokenizers import announced_vocabulary, texts_of


def test_equal_rewards_of_a_prompt_give_no_update() -> None:
    assert not rloo_advantages(np.ones((3, 4))).any()
    trainer = Trainer(new_model(0), TrainerOptions())
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    update = trainer.step([task.encode("1+1=")] * 2, [[*task.encode(">2"), task.END_OF_SEQUENCE]] * 2, np.zeros(2))
    assert math.isnan(update.gradient_norm)
    assert all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())


def test_update_makes_the_rewarded_response_likelier() -> None:
    prompts, responses = (
        [task.encode("1+1=")] * 2,
        [[*task.encode(">2"), task.END_OF_SEQUENCE], [*task.encode(">3"), task.END_OF_SEQUENCE]],
    )
    trainer = Trainer(new_model(0), TrainerOptions(learning_rate=1e-3))
    gaps = []
    for _ in range(3):
        log_probs = trainer.step(prompts, responses, np.array([1.0, -1.0])).log_probs
        gaps.append(log_probs[:3].sum() - log_probs[3:].sum())
    assert gaps[0] < gaps[1] < gaps[2]


def test_a_sampled_pad_id_is_scored_as_an_ordinary_token() -> None:
    batch = pad([[5, 6], [7]], [[task.PAD, task.END_OF_SEQUENCE], [8, 9, 10, 11]])
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert batch.response_mask.tolist() == [[False, True, True, False], [True, True, True, True]]


def test_padding_does_not_change_log_probs() -> None:
    model = new_model(0)
    alone, beside = pad([[5, 6]], [[7, 8]]), pad([[5, 6], [7]], [[7, 8], [9] * 20])
    with torch.no_grad():
        scores = [next_token_log_probs(model, batch, autocast=False)[0][0, 1:3] for batch in (alone, beside)]
    torch.testing.assert_close(scores[0], scores[1], atol=1e-5, rtol=0)


@given(slope=st.floats(-2, 2), cause=arrays(np.float64, 20, elements=st.floats(-1, 1)).filter(lambda a: a @ a > 1e-6))
def test_regression_slope_of_a_line_is_exact(slope: float, cause: np.ndarray) -> None:
    found, error = regression_slope(cause, slope * cause)
    assert found == pytest.approx(slope, abs=1e-9)
    assert error == pytest.approx(0.0, abs=1e-9)


problems = st.lists(st.integers(0, 9), min_size=6, max_size=9).map(lambda digits: task.Problem(tuple(digits)))


def finished(text: str) -> list[int]:
    return [*task.encode(text), task.END_OF_SEQUENCE]


def test_text_of_each_token_is_the_tasks(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    write_tokenizer(tmp_path)  # a second start of the demo
    ids = task.encode(task.CHARACTERS)
    vocabulary = announced_vocabulary(str(tmp_path), [{"tokenizer": TOKENIZER}], "another model")
    assert vocabulary is not None
    texts = texts_of(vocabulary, [*ids, task.PAD, task.END_OF_SEQUENCE])
    assert "".join(texts[token_id] for token_id in ids) == task.decode(ids) == task.CHARACTERS
    assert texts[task.PAD] == "<pad>"
    assert texts[task.END_OF_SEQUENCE] == "<end>"
