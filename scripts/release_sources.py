"""Download the observed files of the frameworks' releases from the package index, for tests/foreshock/integrations.

    python -m scripts.release_sources FOLDER

Writes FOLDER/NAME-VERSION/PATH for each file of `foreshock.integrations.releases`; existing files stay.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from foreshock.integrations.releases import INDEXED, RELEASES


def take(framework: str, version: str, names: list[str], folder: Path) -> None:
    """Download a release without its dependencies and keep the named files. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        # The release is not run, so it may require another Python version.
        any_python = ("--only-binary=:all:", "--ignore-requires-python")
        subprocess.run([*command, *any_python, "-d", temporary, f"{INDEXED[framework]}=={version}"], check=True)
        (wheel,) = Path(temporary).iterdir()
        with zipfile.ZipFile(wheel) as archive:
            for name in names:
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(name))


def main() -> None:
    """Download the missing files."""
    for framework in INDEXED:
        for row in RELEASES[framework]:
            for version in row.versions:
                folder = Path(sys.argv[1]) / f"{framework}-{version}"
                if not all((folder / name).exists() for name in row.places):
                    take(framework, version, list(row.places), folder)


if __name__ == "__main__":
    main()
