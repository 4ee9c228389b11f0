"""The sentence on certificates near to a run: only where there is one, and true."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foreshock.certify.certificate import Certificate
from foreshock.diagnosis import references
from foreshock.diagnosis.references import reference_sentence
from tests.foreshock.certify.test_registry import ENGINE, made


def of(number: int, k3: float) -> Certificate:
    whole = made()
    size = replace(whole.rows[0].sizes[0], k3=k3)
    return replace(whole, parameters=400_000 * number, rows=(replace(whole.rows[0], sizes=(size,)),))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> list[Certificate]:
    """A registry that a test fills."""
    found: list[Certificate] = []
    monkeypatch.setattr(references, "entries", lambda: found)
    return found


def test_few_certificates_are_told_with_their_largest(registry: list[Certificate]) -> None:
    registry += [of(number, number * 1e-4) for number in (1, 2, 4)]
    assert reference_sentence(ENGINE, "dense") == (
        "Of 3 certificates of vllm 0.32.0 on a CPU with AVX-512 with bfloat16 and AMD's MKL kernels in bfloat16 "
        "(dense models of 0.4 to 1.6 million parameters), all have k3 of at most 4.0e-4 against torch.bfloat16."
    )


def test_of_many_the_end_of_95_percent_is_told(registry: list[Certificate]) -> None:
    registry += [of(1, number * 1e-4) for number in range(1, 21)]
    sentence = reference_sentence(ENGINE, "dense")
    assert sentence is not None
    assert "Of 20 certificates" in sentence
    assert "95 % have k3 of at most 1.9e-3" in sentence


def test_nothing_is_told_without_a_near_certificate(registry: list[Certificate]) -> None:
    assert reference_sentence(ENGINE, "dense") is None
    registry += [of(1, 1e-4)]
    assert reference_sentence(ENGINE, None) is None
    assert reference_sentence(None, "dense") is None
    assert reference_sentence(replace(ENGINE, device_name="Intel(R) Xeon(R)", flags={}), "dense") is None


def test_certificate_whose_row_was_not_tried_is_not_counted(registry: list[Certificate]) -> None:
    registry += [of(1, 1e-4), replace(of(1, 1.0), rows=())]
    sentence = reference_sentence(ENGINE, "dense")
    assert sentence is not None
    assert sentence.startswith("Of 1 certificate of")
