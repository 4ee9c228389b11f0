"""Pictures of the documents are small, and each is one that the script takes and a document shows."""

import re
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from scripts.screenshot import IMAGES, PICTURES, write_small
from tests.paths import DOCS, REPOSITORY

LARGEST_BYTES = 200_000


def test_pictures_are_small_and_taken_by_the_script() -> None:
    assert {path.stem for path in IMAGES.glob("*.png")} == {picture.name for picture in PICTURES}
    assert all(path.stat().st_size < LARGEST_BYTES for path in IMAGES.iterdir())


def test_every_picture_is_shown_with_a_text_for_those_who_cannot_see_it() -> None:
    documents = [REPOSITORY / "README.md", *DOCS.rglob("*.md")]
    shown = [match for path in documents for match in re.findall(r"!\[(.*?)\]\(\S*?(\w+)\.png\)", path.read_text())]
    assert {name for _, name in shown} == {picture.name for picture in PICTURES}
    assert all(text for text, _ in shown)


def test_palette_keeps_a_pages_colours(tmp_path: Path) -> None:
    pixels = np.full((40, 60, 3), 255, np.uint8)
    pixels[:20] = (192, 28, 40)
    taken = BytesIO()
    Image.fromarray(pixels).save(taken, format="PNG")
    assert write_small(tmp_path / "small.png", taken.getvalue()) < len(taken.getvalue()) + 200
    with Image.open(tmp_path / "small.png") as small:
        assert np.array_equal(np.asarray(small.convert("RGB")), pixels)
