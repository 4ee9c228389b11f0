"""The documentation site builds strictly, has every document, loads nothing from other hosts, and can be searched."""

import re
import tomllib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from playwright.sync_api import Error, Page

from scripts.chromium import running_chromium
from scripts.documentation.__main__ import CONFIGURATION, SITE, build
from scripts.documentation.hosts import loaded_from_other_hosts
from scripts.documentation.sources import SOURCES, write_sources
from tests.paths import DOCS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site() -> Path:
    """The built site, which a broken link would keep from being built."""
    write_sources(SOURCES)
    done = build()
    assert done.returncode == 0, done.stdout
    return SITE


def in_navigation(entries: list[dict[str, Any]]) -> Iterator[str]:
    for entry in entries:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from in_navigation(value)


def test_every_document_is_in_the_navigation_once(site: Path) -> None:
    pages = list(in_navigation(tomllib.loads(CONFIGURATION.read_text())["project"]["nav"]))
    assert len(pages) == len(set(pages))
    written = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.md")}
    assert set(pages) == written
    assert {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} < written
    for page in pages:
        assert (site / page).with_suffix(".html").is_file() or (site / page).with_name("index.html").is_file(), page


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    assert loaded_from_other_hosts(site) == []


def test_names_of_python_have_anchors(site: Path) -> None:
    python = (site / "reference" / "python.html").read_text()
    for name in ("foreshock.client.client.Client.log_rollouts", "foreshock.client.reader.Reader.measurements"):
        assert f'id="{name}"' in python


@pytest.mark.parametrize(
    ("text", "found"),
    [("[page](missing.md)", "page does not exist"), ("[part](index.md#nowhere)", "anchor does not exist")],
)
def test_broken_link_fails_the_build(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Home\n\n{text}\n")
    configuration = tmp_path / "zensical.toml"
    configuration.write_text('[project]\nsite_name = "T"\n')
    done = build(configuration)
    assert done.returncode != 0
    assert found in done.stdout


def test_search_finds_a_page_without_other_hosts(site: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    asked: list[str] = []
    try:
        with running_chromium() as browser:
            page = browser.new_page()
            page.on("request", lambda request: asked.append(request.url))
            page.goto(f"{address}/index.html")
            _open_search(page)
            page.keyboard.type("pareto")
            page.get_by_text(re.compile(r"^[1-9]\d* results$")).first.wait_for(timeout=60_000)
    finally:
        server.shutdown()
        server.server_close()
    assert [url for url in asked if not url.startswith((address, "blob:", "data:"))] == []


def _open_search(page: Page) -> None:
    """Press the key of the search until its field has the focus: the page may not listen yet."""
    for remaining in reversed(range(30)):
        page.keyboard.press("/")
        try:
            page.locator("input:focus").first.wait_for(timeout=2_000)
            return
        except Error:
            if not remaining:
                raise


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Print nothing."""
