"""A batch from verl's own `DataProto`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from verl import DataProto

from foreshock.rollouts import BatchAttributes, RolloutBatch


def data_proto(**tensors: torch.Tensor) -> Any:
    """Two rollouts: prompts of 1 and 2 tokens (padded left), responses of 3 and 2 (padded right)."""
    values = {
        "prompts": torch.tensor([[0, 5], [6, 7]]),
        "responses": torch.tensor([[10, 11, 12], [20, 21, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
        "response_mask": torch.tensor([[1, 0, 1], [1, 1, 0]]),
        "rollout_log_probs": torch.tensor([[-1.0, 0.0, -2.0], [-3.0, -4.0, 0.0]]),
        "old_log_probs": torch.tensor([[-1.5, 0.0, -2.0], [-3.0, -4.5, 0.0]]),
        "advantages": torch.tensor([[0.5, 0.5, 0.5], [-0.5, -0.5, 0.0]]),
        "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
        **tensors,
    }
    return DataProto.from_dict(values, non_tensors={"uid": np.array(["a", "a"], dtype=object)})


def test_batch_has_the_tokens_log_probs_and_groups_of_a_data_proto() -> None:
    batch = RolloutBatch.from_verl(data_proto(), attributes=BatchAttributes(trainer_policy="recomputed_old"))
    assert batch.prompt_token_ids.tolist() == [5, 6, 7]
    assert batch.response_token_ids.tolist() == [10, 11, 12, 20, 21]
    assert batch.generated.tolist() == [True, False, True, True, True]
    assert np.asarray(batch.rollout_log_probs).tolist() == [-1, 0, -2, -3, -4]
    assert np.asarray(batch.trainer_log_probs).tolist() == [-1.5, 0, -2, -3, -4.5]
    assert np.asarray(batch.reward).tolist() == [1, 0]
    assert np.asarray(batch.advantage).tolist() == [0.5, 0.5, 0.5, -0.5, -0.5]
    assert batch.group_ids == ["a", "a"]
    assert batch.attributes.trainer_policy == "recomputed_old"


def test_given_columns_override_those_of_the_data_proto() -> None:
    batch = RolloutBatch.from_verl(data_proto(), group_ids=["x", "y"], weights_version=np.array([3, 4], np.int32))
    assert batch.group_ids == ["x", "y"]
    assert np.asarray(batch.weights_version).tolist() == [3, 3, 3, 4, 4]


def test_missing_tensor_is_named() -> None:
    data = data_proto()
    data.batch.pop("attention_mask")
    with pytest.raises(KeyError, match="attention_mask"):
        RolloutBatch.from_verl(data)
