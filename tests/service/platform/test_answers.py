"""Answers: entity tags and If-None-Match; compressed only by a coding that the client accepts."""

from __future__ import annotations

import gzip

import pytest

from foreshock_service.platform.compression import compressed
from foreshock_service.platform.etags import etag_of, matches, names_version


def test_tags_are_equal_only_for_equal_versions_and_bodies() -> None:
    assert etag_of("1-7-3", b"body") == etag_of("1-7-3", b"body")
    assert len({etag_of("1-23", b""), etag_of("12-3", b""), etag_of("1-2-3", b""), etag_of("1-23", b"x")}) == 4


@pytest.mark.parametrize("header", ['"1-7-3"', 'W/"1-7-3"', '"x", "1-7-3"', "*", '"x",W/"1-7-3"'])
def test_a_header_that_names_the_tag_matches(header: str) -> None:
    assert matches(header, '"1-7-3"')


@pytest.mark.parametrize("header", [None, "", '"1-7-4"', "1-7-3", '"x", "y"', 'W/"x"'])
def test_a_header_without_the_tag_does_not_match(header: str | None) -> None:
    assert not matches(header, '"1-7-3"')


@pytest.mark.parametrize("header", [etag_of("1-7-3", b"a"), f'"x", W/{etag_of("1-7-3", b"b")}', "*"])
def test_a_tag_names_its_version_whatever_the_body(header: str) -> None:
    assert names_version(header, "1-7-3")


@pytest.mark.parametrize("header", [None, "", etag_of("1-7-31", b"a"), etag_of("11-7-3", b"a"), '"x"', '".1-7-3"'])
def test_a_tag_of_another_version_does_not_name_it(header: str | None) -> None:
    assert not names_version(header, "1-7-3")


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
