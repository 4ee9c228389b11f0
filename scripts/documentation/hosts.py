"""Find what a built page loads from other hosts. Links that a reader follows do not count."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

_LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
# A `<link>` of these kinds loads nothing.
_LINKS = {"canonical", "prev", "next", "alternate", "author", "license"}


class _Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        address = attributes.get(_LOADING.get(tag, "")) or ""
        if tag == "link" and attributes.get("rel") in _LINKS:
            return
        if address.startswith(("http:", "https:", "//")):
            self.addresses.append(address)


def loaded_from_other_hosts(site: Path) -> list[str]:
    """Return "page: address" of every script, style, picture and frame that a page loads from another host."""
    found = []
    for page in sorted(site.rglob("*.html")):
        loads = _Loads()
        loads.feed(page.read_text())
        found += [f"{page.relative_to(site)}: {address}" for address in loads.addresses]
    for style in sorted(site.rglob("*.css")):
        text = style.read_text()
        found += [
            f"{style.relative_to(site)}: {start}" for start in ("url(http", "url(//", '@import "http') if start in text
        ]
    return found
