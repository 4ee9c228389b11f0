"""Take a picture of every page and of every kind of run: `make gallery` writes them and their index to build/gallery.

The pages are those of `test_every_page`. The runs are the five kinds, the ten recorded histories of the diagnosis, and
the runs with bad data; under each picture stands the first sentence of its page. With `--serve` the service stays up.
"""

import html
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import Page

from foreshock_service.platform.database.opening import upgrade
from scripts.chromium import MISSING, chromium_program, running_chromium
from tests.golden.answers import log_history
from tests.golden.histories import COLLAPSES, histories
from tests.paths import REPOSITORY
from tests.service.present.pages.bad_runs import KINDS as BAD
from tests.service.present.pages.bad_runs import send_bad_runs
from tests.service.present.pages.browsing import PATIENCE_MS, Visit
from tests.service.present.pages.conftest import Fleet, running_app, send_fleet
from tests.service.present.pages.fleet import KINDS
from tests.service.present.pages.test_every_page import PAGES, SCHEMES, SIZES, opened

FOLDER = REPOSITORY / "build" / "gallery"


def main() -> int:
    """Take every picture; return the exit status."""
    if chromium_program() is None:
        print(MISSING, file=sys.stderr)
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foreshock-gallery-")))
        upgrade(f"sqlite:///{folder / 'foreshock.db'}")
        http, app = stack.enter_context(running_app(folder))
        fleet = send_fleet(http)
        send_bad_runs(fleet.http, app.state.context.database)
        recorded = histories()
        for history in COLLAPSES:
            log_history(fleet.http, recorded[history])
        if "--serve" in sys.argv:
            print(fleet.url, flush=True)
            sys.stdin.read()
        with running_chromium() as browser:
            page = browser.new_page()
            page.set_default_timeout(PATIENCE_MS)
            figures = [*pictures_of_pages(page, fleet), *pictures_of_runs(page, fleet)]
    (FOLDER / "index.html").write_text(
        '<!doctype html><meta charset="utf-8"><title>Gallery</title><style>figure { display: inline-block; '
        "width: 420px; vertical-align: top; margin: 8px } img { width: 100% }</style>" + "\n".join(figures)
    )
    print(f"{len(figures)} pictures: {FOLDER / 'index.html'}")
    return 0


def pictures_of_pages(page: Page, fleet: Fleet) -> Iterator[str]:
    """Take every page at every width, light and dark."""
    visit = Visit(page)
    for name, address in PAGES.items():
        for width in SIZES:
            opened(visit, fleet, address(fleet), width)
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                yield taken(page, f"{name}-{width}-{scheme}", f"{name}, {width} px, {scheme}")


def pictures_of_runs(page: Page, fleet: Fleet) -> Iterator[str]:
    """Take the page of every run at 1440 px, and of a run with bad data at 390 px too."""
    visit = Visit(page)
    page.emulate_media(color_scheme="light")
    runs = [("default", name) for name in (*KINDS, *COLLAPSES)] + [("bad", name) for name in BAD]
    for number, (project, name) in enumerate(runs):
        for width in (1440, 390) if project == "bad" else (1440,):
            opened(visit, fleet, f"/runs/{project}/{quote(name, safe='')}", width)
            sentence = page.locator(".verdict strong").inner_text()
            yield taken(page, f"of-run-{number:02d}-{width}", f"{name}, {width} px: {sentence}")


def taken(page: Page, name: str, caption: str) -> str:
    """Save the picture of the whole page, and return its entry in the index."""
    page.screenshot(path=FOLDER / f"{name}.png", full_page=True)
    return f'<figure><a href="{name}.png"><img src="{name}.png" loading="lazy"></a>{html.escape(caption)}</figure>'


if __name__ == "__main__":
    sys.exit(main())
