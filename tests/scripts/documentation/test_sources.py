"""Documents keep their links in the site, and generated pages have every name that the code has."""

import importlib.metadata
from pathlib import Path

import pytest

from foreshock.commands.main import ENTRY_POINT_GROUP
from scripts.documentation import command_lines, python_reference
from scripts.documentation.hosts import loaded_from_other_hosts
from scripts.documentation.sources import moved


@pytest.mark.parametrize(
    ("name", "place", "text", "expected"),
    [
        ("README.md", "index.md", "[a](docs/api.md)", "[a](api.md)"),
        ("README.md", "index.md", "![a](docs/images/run.png)", "![a](images/run.png)"),
        ("README.md", "index.md", "[a](docs/early-warning.md#fields)", "[a](early-warning.md#fields)"),
        ("CONTRIBUTING.md", "contributing.md", "[a](README.md)", "[a](index.md)"),
        ("examples/tiny_rl/README.md", "examples/tiny_rl/README.md", "[a](../../docs/api.md)", "[a](../../api.md)"),
        ("README.md", "index.md", "[a](https://example.org)", "[a](https://example.org)"),
        ("README.md", "index.md", "[a](#two-commands)", "[a](#two-commands)"),
        ("README.md", "index.md", "[a](Makefile)", "[a](Makefile)"),
    ],
)
def test_links_lead_to_the_same_document(name: str, place: str, text: str, expected: str) -> None:
    assert moved(text, name, place) == expected


def test_page_of_commands_has_every_command_and_action() -> None:
    page = command_lines.page()
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        assert f"## foreshock {point.name}\n" in page
    assert "usage: foreshock keys rotate" in page
    assert "--step N" in page


def test_page_of_python_has_every_public_name_once() -> None:
    page = python_reference.page()
    places = [line.removeprefix("::: ") for line in page.splitlines() if line.startswith("::: ")]
    assert len(places) == len(set(places))
    for module in python_reference.MODULES:
        for name in python_reference.public_names(module):
            assert f".{name}\n" in page or f".{name}`]" in page, (module, name)


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
