"""Import dumps of training frameworks: one module per format, and `FORMATS`, the table of all of them."""

from pathlib import Path

from foreshock.errors import ConfigurationError
from foreshock.importers import nemo_rl, prime_rl, skyrl, slime
from foreshock.importers.dumps import METRICS_ONLY, Dump, DumpFormat, ImportedStep, ReadOptions

__all__ = ["FORMATS", "Dump", "DumpFormat", "ImportedStep", "ReadOptions", "find_dumps", "formats_of"]

FORMATS: dict[str, DumpFormat] = {each.FORMAT.name: each.FORMAT for each in (prime_rl, nemo_rl, slime, skyrl)}
"""The formats by the value of `foreshock import --format`."""


def find_dumps(name: str, path: Path) -> list[Dump]:
    """Return the dumps of a format in `path`, by step. Raises ConfigurationError if there are none."""
    found = FORMATS[name].find(path)
    if not found:
        others = formats_of(path)
        hint = f"; the files look like --format {' or '.join(others)}" if others else ""
        raise ConfigurationError(
            f"no dumps of {name} in {str(path)!r}: expected {FORMATS[name].layout}{hint or METRICS_ONLY}"
        )
    return found


def formats_of(path: Path) -> list[str]:
    """Return the formats whose files are in `path`."""
    return [name for name, each in FORMATS.items() if path.exists() and each.find(path)]
