"""Take the README's picture: the page of the demo's run, in a real browser. Run `make demo ONCE=1` first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
from playwright.sync_api import sync_playwright

from benchmarks.running_service import running_service

REPOSITORY = Path(__file__).resolve().parents[1]
PICTURE = REPOSITORY / "docs" / "images" / "run.png"
WIDTH, HEIGHT = 1280, 1500


def main() -> int:
    data = REPOSITORY / "foreshock-data"
    if not data.is_dir():
        print(f"{data} does not exist; run `make demo ONCE=1` first", file=sys.stderr)
        return 1
    browser_program = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_program is None:
        print("neither chromium nor google-chrome is installed; run `sudo apt-get install chromium`", file=sys.stderr)
        return 1
    with running_service(REPOSITORY) as address, sync_playwright() as playwright:
        run = httpx.get(f"{address}/v1/runs").json()["items"][0]["id"]
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=browser_program, args=[*arguments, "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(f"{address}/runs/{run}")
        page.wait_for_selector("body[data-drawn=yes]", timeout=120_000)
        PICTURE.parent.mkdir(exist_ok=True)
        page.screenshot(path=PICTURE)
        browser.close()
    (REPOSITORY / "serve.log").unlink(missing_ok=True)
    if shutil.which("optipng"):
        subprocess.run(["optipng", "-quiet", str(PICTURE)], check=True)
    print(PICTURE.relative_to(REPOSITORY))
    return 0


if __name__ == "__main__":
    sys.exit(main())
