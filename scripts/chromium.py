"""The browser for tests, the benchmark of the pages and the pictures of the documentation."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

MISSING = "Chromium is missing: apt-get install chromium-headless-shell"
# The headless shell is Chromium without windows: the same pages for half of the CPU time.
_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def chromium_program() -> str | None:
    """Return the path of an installed Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, _PROGRAMS)), None)


@contextmanager
def running_chromium() -> Iterator[Browser]:
    """Run the browser without a window.

    Raises:
        FileNotFoundError: No Chromium is installed.
    """
    program = chromium_program()
    if program is None:
        raise FileNotFoundError(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(_ARGUMENTS))
        yield browser
        browser.close()
