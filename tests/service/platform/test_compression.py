"""Answers are compressed only by a coding that the client accepts."""

import gzip
from collections.abc import Callable

import pytest

from foreshock_service.platform.compression import compressed, zstd

BODY = b"[0.125, 0.25]" * 100
DECOMPRESS: dict[str | None, Callable[[bytes], bytes]] = {"zstd": zstd.decompress, "gzip": gzip.decompress, None: bytes}


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("zstd", "zstd"),
        ("gzip, deflate, br, zstd", "zstd"),
        ("gzip", "gzip"),
        ("GZIP ; q=0.5", "gzip"),
        ("zstd;q=0, gzip", "gzip"),
        ("zstd;q=0.000, gzip;q=0.001", "gzip"),
        ("zstd;q=0, *", "gzip"),
        ("*", "zstd"),
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
    assert DECOMPRESS[coding](body) == BODY


def test_small_body_is_not_compressed() -> None:
    assert compressed(b"[]", "zstd") == (b"[]", {})
