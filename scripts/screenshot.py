"""Take the pictures of the README and the tour: pages of the demo's collapsed run, in a real browser.

Run `make demo ONCE=1` first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import Browser

from benchmarks.running_service import running_service
from examples.demo.records import COLLAPSED
from examples.demo.service_child import tokenizers_of
from foreshock import Reader
from foreshock.commands.queries import find_run
from foreshock.page_addresses import run_page_path
from scripts.chromium import MISSING, chromium_program, running_chromium

REPOSITORY = Path(__file__).resolve().parents[1]
IMAGES = REPOSITORY / "docs" / "images"
WIDTH = 1280
REPLAYED_STEP = 20
COLOURS = 128
"""Colours in a picture's palette: pages have few colours, and the picture then takes a third of the bytes."""
COARSE = 10
LARGEST_DIFFERENCE = 0.02
_READY = "body[data-drawn=yes]"


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: the path of its page, with `{run}`, `{step}` and `{rollout}`, and its height in pixels.

    `scroll_to` selects the element at its top, `click` the element that is clicked first.
    """

    name: str
    path: str
    height: int
    scroll_to: str | None = None
    click: str | None = None


PICTURES = (
    Picture("run", "{run}", 1100),
    Picture("runs", "/", 420),
    Picture("step", "{step}", 1000),
    Picture("rollout", "{rollout}", 700),
)


def main() -> int:
    """Take every picture; return the exit status."""
    data = REPOSITORY / "foreshock-data"
    if not data.is_dir():
        print(f"{data} does not exist; run `make demo ONCE=1` first", file=sys.stderr)
        return 1
    if chromium_program() is None:
        print(MISSING, file=sys.stderr)
        return 1
    IMAGES.mkdir(exist_ok=True)
    # numpy's pass over tokens, because this takes no measurement that would justify compilation.
    settings = {"FORESHOCK_TOKENIZERS_FOLDER": str(tokenizers_of(data)), "FORESHOCK_TOKEN_PASS": "numpy"}
    with running_service(REPOSITORY, **settings) as address:
        for picture, taken in pictures(address):
            file = IMAGES / f"{picture.name}.png"
            print(f"{file.relative_to(REPOSITORY)}: {write_small(file, taken) / 1000:.0f} kB")
    (REPOSITORY / "serve.log").unlink(missing_ok=True)
    return 0


def pictures(address: str) -> Iterator[tuple[Picture, bytes]]:
    """Yield every picture of the demo that runs at this address."""
    places = pages_of_the_demo(address)
    with running_chromium() as browser:
        for picture in PICTURES:
            yield picture, take(browser, picture, address + picture.path.format(**places))


def pages_of_the_demo(address: str) -> dict[str, str]:
    """Return the paths of the demo's collapsed run, its replayed step, and the rollout with the largest |d| there."""
    with Reader(address) as reader:
        run = find_run(reader, COLLAPSED.name)
        worst = reader.worst_tokens(run.id, REPLAYED_STEP, count=1).columns["sample_id"][0]
    path = run_page_path(run.project, run.key)
    step = f"{path}/steps/{REPLAYED_STEP}"
    return {"run": path, "step": step, "rollout": f"{step}/rollouts/{worst}"}


def take(browser: Browser, picture: Picture, address: str) -> bytes:
    """Return the picture of a page, in light colours."""
    page = browser.new_page(viewport={"width": WIDTH, "height": picture.height}, color_scheme="light")
    page.goto(address)
    page.wait_for_selector(_READY, timeout=120_000)
    if picture.click:
        page.click(picture.click)
    if picture.scroll_to:
        page.evaluate("selector => document.querySelector(selector).scrollIntoView()", picture.scroll_to)
    taken = page.screenshot()
    page.close()
    return taken


def difference(taken: bytes, file: Path) -> float:
    """Return how much a picture differs from a file, from 0 to 1; 1 if the sizes differ.

    Squares of ten pixels are compared, so that fonts and times hardly matter.
    """
    with Image.open(BytesIO(taken)) as one, Image.open(file) as other:
        if one.size != other.size:
            return 1.0
        width, height = one.width // COARSE, one.height // COARSE
        small = [each.convert("L").resize((width, height), Image.Resampling.BOX) for each in (one, other)]
    return float(np.abs(np.asarray(small[0], float) - np.asarray(small[1], float)).mean() / 255)


def write_small(file: Path, taken: bytes) -> int:
    """Write a picture with a palette of its own; return its size in bytes."""
    with Image.open(BytesIO(taken)) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    return file.stat().st_size


if __name__ == "__main__":
    sys.exit(main())
