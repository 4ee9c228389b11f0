"""Entity tags and If-None-Match."""

from __future__ import annotations

import pytest

from service.platform.etag import etag_of, matches


def test_tags_are_equal_only_for_equal_versions() -> None:
    assert etag_of(1, 7, 3) == '"1-7-3"' == etag_of(1, 7, 3)
    assert len({etag_of(1, 23), etag_of(12, 3), etag_of(1, 2, 3)}) == 3


@pytest.mark.parametrize("header", ['"1-7-3"', 'W/"1-7-3"', '"x", "1-7-3"', "*", '"x",W/"1-7-3"'])
def test_a_header_that_names_the_tag_matches(header: str) -> None:
    assert matches(header, '"1-7-3"')


@pytest.mark.parametrize("header", [None, "", '"1-7-4"', "1-7-3", '"x", "y"', 'W/"x"'])
def test_a_header_without_the_tag_does_not_match(header: str | None) -> None:
    assert not matches(header, '"1-7-3"')
