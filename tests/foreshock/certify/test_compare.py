"""Two certificates of one model: what became worse or better."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foreshock.certify.compare import compare, comparison_lines
from foreshock.errors import ConfigurationError
from tests.foreshock.certify.making import certificate, not_tried, row

OLD = certificate(row("prefill", 0.01), row("batch_1", 0.0))


def test_equal_certificates_have_no_row() -> None:
    assert compare(OLD, OLD) == []
    assert comparison_lines(OLD, OLD, []) == [
        "None of 2 rows became worse or better than in the certificate of 2026-11-29T12:00:00Z."
    ]


def test_a_row_beyond_noise_is_worse_and_the_other_way_round_better() -> None:
    new = certificate(row("prefill", 0.05), row("batch_1", 0.0))
    (worse,) = compare(new, OLD)
    assert (worse.row, worse.change) == ("prefill", "worse")
    assert worse.sentence.startswith("rounding before, different now: E[d²]/2 in bfloat16 was 4.6e-5 and is 1.1e-3")
    (better,) = compare(OLD, new)
    assert (better.row, better.change) == ("prefill", "better")


def test_a_change_far_below_the_floor_is_none() -> None:
    assert compare(certificate(row("prefill", 0.01), row("batch_1", 1e-4)), OLD) == []


def test_noise_of_other_samples_is_no_change() -> None:
    for seed in range(20):
        assert compare(certificate(row("prefill", 0.01, seed), row("batch_1", 0.0)), OLD) == []


def test_rows_that_only_one_has_are_said() -> None:
    new = certificate(not_tried("prefill", "the engine died"), row("batch_1", 0.0), row("lora", 0.01))
    found = {each.row: each for each in compare(new, OLD)}
    assert found["prefill"].change == "not compared"
    assert "the engine died" in found["prefill"].sentence
    assert found["lora"].change == "new"


def test_another_model_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="of other weights"):
        compare(OLD, replace(OLD, model_digest="sha256:" + "b" * 64))
