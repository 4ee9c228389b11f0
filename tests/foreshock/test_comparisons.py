"""Names of comparisons."""

from __future__ import annotations

import pytest

from foreshock.comparisons import TRAINER_ROLLOUT, comparison_name, split_comparison
from foreshock.errors import ConfigurationError


def test_name_splits_into_the_scorers_it_was_built_from() -> None:
    assert comparison_name("trainer", "rollout") == TRAINER_ROLLOUT
    assert split_comparison(comparison_name("torch.float32", "vllm.prefill")) == ("torch.float32", "vllm.prefill")


@pytest.mark.parametrize("name", ["", "rollout", "/rollout", "trainer/"])
def test_name_without_two_scorers_is_rejected(name: str) -> None:
    with pytest.raises(ConfigurationError, match="must be target/behaviour, such as trainer/rollout"):
        split_comparison(name)
