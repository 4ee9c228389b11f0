"""What a page loads from another host is found; what a reader may follow is none of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.documentation.hosts import loaded_from_other_hosts


@pytest.mark.parametrize(
    "loading",
    [
        '<script src="https://cdn.example/a.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/a.css">',
        '<img src="http://pictures.example/a.png">',
    ],
)
def test_loads_from_other_hosts_are_found(tmp_path: Path, loading: str) -> None:
    (tmp_path / "page.html").write_text(f"<html><head>{loading}</head></html>")
    (found,) = loaded_from_other_hosts(tmp_path)
    assert found.startswith("page.html: ")
    assert ".example/a" in found


def test_fonts_of_other_hosts_in_styles_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("@font-face{src:url(https://fonts.example/a.woff2)}")
    assert loaded_from_other_hosts(tmp_path) == ["a.css: url(http"]


def test_links_and_own_files_are_no_loads(tmp_path: Path) -> None:
    links = '<a href="https://example.org">there</a><link rel="canonical" href="https://example.org/page">'
    (tmp_path / "page.html").write_text(f'{links}<script src="assets/a.js"></script><img src="../images/run.png">')
    assert loaded_from_other_hosts(tmp_path) == []
