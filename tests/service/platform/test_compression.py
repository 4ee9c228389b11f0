"""Answers are compressed only by a coding that the client accepts."""

import gzip

import pytest

from foreshock_service.platform.compression import compressed

BODY = b"[0.125, 0.25]" * 100


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("gzip, deflate, br, zstd", "gzip"),
        ("gzip", "gzip"),
        ("GZIP ; q=0.5", "gzip"),
        ("zstd;q=0.000, gzip;q=0.001", "gzip"),
        ("zstd;q=0, *", "gzip"),
        ("*", "gzip"),
        ("zstd", None),
        ("*;q=0, gzip", "gzip"),
        ("gzip;q=0.00", None),
        ("zstd; q = 0, gzip;q=0", None),
        ("*;q=0", None),
        ("identity", None),
        ("", None),
        (None, None),
    ],
)
def test_body_has_a_coding_that_is_accepted(accepted: str | None, coding: str | None) -> None:
    body, headers = compressed(BODY, accepted)
    assert headers == ({"Content-Encoding": coding} if coding else {})
    assert (gzip.decompress(body) if coding else body) == BODY


def test_small_body_is_not_compressed() -> None:
    assert compressed(b"[]", "gzip") == (b"[]", {})
