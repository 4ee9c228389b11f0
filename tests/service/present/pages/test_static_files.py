"""Static files: compressed, kept by their version, and only those that are named."""

import re

import pytest

from tests.paths import REPOSITORY
from tests.service.present.pages.conftest import Site

PAGES = REPOSITORY / "service" / "foreshock_service" / "present" / "pages"


def test_focusable_parts_have_a_role_a_name_and_a_rule_of_css() -> None:
    css, found = (PAGES / "static" / "foreshock.css").read_text(), 0
    for path in (PAGES / "templates").glob("*.html"):
        for tag in re.findall(r"<[^<>]*\btabindex=[^<>]*>", path.read_text()):
            found += 1
            assert 'role="' in tag, f"{path.name}: {tag}"
            assert re.search(r'aria-label(ledby)?="', tag), f"{path.name}: {tag}"
            for name in re.findall(r'class="([\w-]+)"', tag):
                assert re.search(rf"\.{name}\b", css), f"{path.name}: no rule for .{name}"
    assert found >= 10


class TestStaticFiles:
    def test_plotly_is_compressed_and_may_be_kept(self, site: Site) -> None:
        (address,) = re.findall(
            r'href="(/static/plotly-basic\.min\.js\?v=[^"]+)"', site.http.get(site.run.address).text
        )
        answer = site.http.get(address).raise_for_status()
        assert b"plotly.js (basic - minified) v4" in answer.content[:200]
        assert answer.headers["content-encoding"] == "gzip"
        plain = site.http.get(address, headers={"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.content == answer.content
        assert answer.headers["content-type"].startswith("text/javascript")
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"

    def test_address_without_its_version_is_revalidated(self, site: Site) -> None:
        http = site.http
        assert http.get("/static/page.js").headers["cache-control"] == "no-cache"
        assert http.get("/static/page.js?v=old").headers["cache-control"] == "no-cache"

    @pytest.mark.parametrize("name", ["nothing.js", "..%2fassets.py", "%2e%2e/policy.py", ".", "foreshock.css%00"])
    def test_only_the_named_files_are_served(self, site: Site, name: str) -> None:
        assert site.http.get(f"/static/{name}").status_code == 404
