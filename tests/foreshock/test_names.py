"""Names of comparisons, the order of severities, ranges as words."""

from typing import get_args

import pytest

from foreshock.comparisons import TRAINER_ROLLOUT, comparison_name, split_comparison
from foreshock.errors import ConfigurationError
from foreshock.interval_names import UNTOLD, ends_in_words, range_in_words
from foreshock.severity import SEVERITIES, Severity, severity_rank


def test_name_splits_into_the_scorers_it_was_built_from() -> None:
    assert comparison_name("trainer", "rollout") == TRAINER_ROLLOUT
    assert split_comparison(comparison_name("torch.float32", "vllm.prefill")) == ("torch.float32", "vllm.prefill")


@pytest.mark.parametrize("name", ["", "rollout", "/rollout", "trainer/"])
def test_name_without_two_scorers_is_rejected(name: str) -> None:
    with pytest.raises(ConfigurationError, match="must be target/behaviour, such as trainer/rollout"):
        split_comparison(name)


def test_the_most_severe_comes_first() -> None:
    assert sorted(["info", "warning", "critical", "warning"], key=severity_rank) == [
        "critical", "warning", "warning", "info",
    ]  # fmt: skip


def test_every_severity_has_a_rank_and_an_unknown_one_comes_last() -> None:
    assert set(SEVERITIES) == set(get_args(Severity))
    assert severity_rank("urgent") > max(map(severity_rank, SEVERITIES))


@pytest.mark.parametrize(
    ("mean", "low", "high", "words"),
    [(1.2, 0.0, 2639.0, UNTOLD), (2e-4, 0.0, 0.5, UNTOLD), (0.0, 0.0, 1.0, UNTOLD),
     (2e-4, 1e-4, 3e-4, "0.0001 to 0.0003"), (2e-4, 0.0, 2e-2, "0 to 0.02"), (3e-6, 0.0, 5e-4, "0 to 0.0005")],
)  # fmt: skip
def test_a_range_beyond_a_hundred_means_tells_nothing(mean: float, low: float, high: float, words: str) -> None:
    assert ends_in_words(mean, low, high, "{:g}".format) == words


def test_a_range_has_its_name() -> None:
    assert range_in_words(2.0, 1.0, 3.0, "{:g}".format) == "range over the prompts 1 to 3"
    assert range_in_words(2.0, 0.0, 3000.0, "{:g}".format) == "range over the prompts: cannot tell"
