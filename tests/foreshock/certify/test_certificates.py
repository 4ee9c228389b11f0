"""Certificates: verdicts by a floor that is measured on the same tokens, two of one model compared, and their texts."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from foreshock.api.records import to_json
from foreshock.certify.certificate import ESS_TOKENS, read_certificate, write_certificate
from foreshock.certify.compare import compare, comparison_lines
from foreshock.certify.judging import judged, largest_tokens
from foreshock.certify.text import certificate_html, certificate_lines, junit_xml, sentence_of
from foreshock.commands.text import Paint
from foreshock.errors import ConfigurationError
from foreshock.lint.checks.penalty import occurred
from tests.foreshock.certify.making import PROMPTS, TOKENS, certificate, log_probs, not_tried, replays, row, tokens_of

BATCH = tokens_of()
MU = log_probs(0)


def test_equal_log_probs_are_identical() -> None:
    verdict, size = judged(BATCH, MU, MU.copy(), replays(), "bfloat16")
    assert verdict == "identical"
    assert (size.equal, size.k3, size.largest, size.ess) == (1.0, 0.0, 0.0, 1.0)


def test_one_bit_is_rounding() -> None:
    other = MU.copy()
    other[5] = np.nextafter(other[5], np.float32(0))
    verdict, size = judged(BATCH, other, MU, replays(), "bfloat16")
    assert verdict == "rounding"
    assert size.equal == pytest.approx(1 - 1 / MU.size)


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_a_precision_is_rounding(seed: int) -> None:
    assert judged(BATCH, log_probs(seed, 0.01), MU, replays(0.01), "bfloat16")[0] == "rounding"


@pytest.mark.parametrize("seed", range(20))
def test_three_times_the_noise_of_precisions_is_different(seed: int) -> None:
    assert judged(BATCH, log_probs(seed, 0.03), MU, replays(0.01), "bfloat16")[0] == "different"


def test_rounding_at_unsteady_tokens_hides_no_change_at_steady_ones() -> None:
    """A tenth of the tokens rounds a hundred times worse; a change moves the others by five times their noise."""
    rough = np.arange(MU.size) % 10 == 0
    noises = [np.random.default_rng(seed).normal(size=MU.size) * np.where(rough, 0.3, 0.003) for seed in (1, 2, 3, 4)]
    precisions = [(MU + noise).astype(np.float32) for noise in noises[:3]]
    healthy = (MU + noises[3]).astype(np.float32)
    assert judged(BATCH, healthy, MU, precisions, "bfloat16")[0] == "rounding"
    changed = healthy + np.where(rough, 0.0, 0.03).astype(np.float32)
    verdict, size = judged(BATCH, changed, MU, precisions, "bfloat16")
    assert size.half_square_low < size.floor
    assert verdict == "different"


@pytest.mark.parametrize("seed", range(20))
def test_small_difference_at_tokens_that_occurred_before_is_a_penalty(seed: int) -> None:
    """k3 is within the floor, as most of it is noise; the same difference at as many other tokens is noise too."""
    again = occurred(BATCH, slice(0, PROMPTS))
    other = np.random.default_rng(seed).permutation(again)
    noisy = log_probs(seed + 200, 0.01)
    verdict, size = judged(BATCH, noisy + 0.015 * again.astype(np.float32), MU, replays(0.01), "bfloat16")
    assert size.half_square_low < size.floor
    assert size.steady < size.steady_floor
    assert verdict == "different"
    assert "as by a repetition, presence or frequency penalty" in sentence_of(verdict, [size])
    assert judged(BATCH, noisy + 0.015 * other.astype(np.float32), MU, replays(0.01), "bfloat16")[0] == "rounding"


def test_tokens_that_one_precision_removes_are_not_compared() -> None:
    """Top-p removes a token at its edge in one precision; one that all precisions remove counts."""
    precisions = [each.copy() for each in replays()]
    precisions[0][7] = -np.inf
    one = MU + np.float32(0.001)
    one[7] = -np.inf
    verdict, size = judged(BATCH, one, MU, precisions, "bfloat16")
    assert (verdict, size.tokens) == ("rounding", MU.size - 1)
    for each in precisions:
        each[7] = -np.inf
    verdict, size = judged(BATCH, one, MU, precisions, "bfloat16")
    assert size.half_square == pytest.approx(12.5 / MU.size, rel=1e-2)
    assert "at least 5.0e-7 without few prompts, within the floor" in sentence_of(verdict, [size])


def test_float32_has_a_floor_of_its_own() -> None:
    precisions = [log_probs(seed, 1e-6) for seed in (1, 2)]
    assert judged(BATCH, log_probs(5, 1e-6), MU, precisions, "float32")[0] == "rounding"
    assert judged(BATCH, log_probs(5, 1e-4), MU, precisions, "float32")[0] == "different"


def test_only_chosen_tokens_count() -> None:
    chosen = np.arange(MU.size) % TOKENS == TOKENS - 1
    other = np.where(chosen, MU, np.float32(-9.0))
    verdict, size = judged(BATCH, other, MU, replays(), "bfloat16", chosen)
    assert (verdict, size.tokens) == ("identical", PROMPTS)


def test_size_is_that_of_the_ratios() -> None:
    """A constant d = 0.5 has k3 = e^0.5 − 1.5, and all ratios are beyond the clip range, with equal weights."""
    _, size = judged(BATCH, (MU + 0.5).astype(np.float32), MU, replays(), "bfloat16")
    assert size.k3 == pytest.approx(math.exp(0.5) - 1.5, rel=1e-5)
    assert size.beyond_clip == 1.0
    assert size.half_square == pytest.approx(0.125, rel=1e-5)
    assert size.ess == pytest.approx(1.0, abs=1e-3)


def test_ess_is_that_of_independent_tokens() -> None:
    sigma = 0.02
    _, size = judged(BATCH, log_probs(3, sigma), MU, replays(), "bfloat16")
    assert size.ess == pytest.approx(math.exp(-ESS_TOKENS * sigma**2), abs=0.08)


def test_prompts_have_the_sums_of_their_tokens() -> None:
    _, size = judged(BATCH, log_probs(2, 0.05), MU, replays(), "bfloat16")
    assert [each.tokens for each in size.prompts] == [TOKENS] * PROMPTS
    total = sum(each.half_squares for each in size.prompts)
    assert total / MU.size == pytest.approx(size.half_square)


def test_tokens_that_differ_most_are_named() -> None:
    other = MU.copy()
    other[TOKENS + 3] -= 4
    assert f"id {BATCH.response_token_ids[TOKENS + 3]} at place 3 of rollout p1" in largest_tokens(BATCH, other, MU)


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


FOUND = certificate(
    row("prefill", 0.0),
    row("batch_1", 0.01),
    row("trainer/vllm.decode", 0.1, cause="norm_eps", why=("The ε of the <norms> is another.",)),
    not_tried("lora", "vLLM refuses rank 3"),
)


def test_text_has_a_line_for_each_row_and_says_why() -> None:
    lines = certificate_lines(FOUND, Paint(io.StringIO()))
    text = "\n".join(lines)
    assert "4 conditions: 1 identical, 1 rounding, 1 different, 1 not tried" in text
    for name in ("prefill", "batch_1", "trainer/vllm.decode", "lora"):
        assert f"\n  {name} " in text
    assert "The ε of the <norms> is another." in text
    assert "vLLM refuses rank 3" in text
    assert "beyond the floor" in " ".join(text.split())
    assert max(map(len, lines)) <= 100


def test_html_is_one_file_with_escaped_text() -> None:
    page = certificate_html(FOUND)
    assert page.count("<tr class=") == 4
    assert "&lt;norms&gt;" in page
    assert "http" not in page


def test_junit_has_a_failure_for_what_is_different_or_worse() -> None:
    suite = ElementTree.fromstring(junit_xml(FOUND, ["batch_1"]))
    assert {name: suite.attrib[name] for name in ("tests", "failures", "skipped")} == {
        "tests": "4", "failures": "2", "skipped": "1",
    }  # fmt: skip
    failed = [case.attrib["name"] for case in suite if case.find("failure") is not None]
    assert failed == ["batch_1", "trainer/vllm.decode"]


def test_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_certificate(tmp_path / "cert.json", FOUND)
    assert to_json(read_certificate(tmp_path / "cert.json")) == to_json(FOUND)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "lacks schema"),
        ('{"schema": 1, "rows": []}', "is no certificate"),
        ('{"schema": 2, "rows": []}', "of schema 2; this release reads schema 1"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "cert.json").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_certificate(tmp_path / "cert.json")


def test_file_of_a_newer_release_with_more_fields_is_read(tmp_path: Path) -> None:
    value = to_json(FOUND)
    value["rows"][0]["new"] = 1
    (tmp_path / "cert.json").write_text(json.dumps(value))
    assert read_certificate(tmp_path / "cert.json").rows[0].name == "prefill"


def test_missing_folder_keeps_no_part(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_certificate(tmp_path / "no" / "cert.json", FOUND)
