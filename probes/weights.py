"""From an announced checkpoint to a folder of weights that may be loaded, or the reason why not.

An announcement is text from a client, so it never becomes a path by itself: it names a root, which only the worker's
own configuration maps to a folder, and a relative path, which must stay inside that folder after all symbolic links
are followed. Only safetensors are loaded, and only if their digest is the announced one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from foreshock.clock import now_us
from foreshock.digests import weights_digest
from foreshock.errors import WeightsError

__all__ = [
    "AnnouncedCheckpoint",
    "UnknownRootError",
    "Weights",
    "WeightsGoneError",
    "WeightsLibrary",
    "WeightsRefusedError",
]

LOADABLE_FORMAT = "hf_safetensors"


class WeightsGoneError(WeightsError):
    """The checkpoint is not there, or not in a form that can be loaded: the probe is skipped, nobody is to blame."""


class WeightsRefusedError(WeightsError):
    """The checkpoint must not be used: it is not the announced one, or its path leaves its root."""


class UnknownRootError(WeightsError):
    """This worker knows no root of that name; another worker may."""


@dataclass(frozen=True, slots=True)
class AnnouncedCheckpoint:
    """A checkpoint as a run announced it. `path` is relative to the root named `root`."""

    root: str
    path: str
    digest: str
    step: int
    format: str = LOADABLE_FORMAT
    weights_version: int | None = None
    expires_at_us: int | None = None


Stamp = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights that were found, checked, and may be loaded from `folder`.

    `stamp` is name, size, inode and time of change of each file at the time of the check.
    """

    folder: Path
    digest: str
    version: int | None
    stamp: Stamp

    def check_unchanged(self) -> None:
        """Raise WeightsRefusedError where a file was replaced since the digest was taken, so that a score made
        meanwhile cannot be trusted."""
        if _stamp(self.folder) != self.stamp:
            raise WeightsRefusedError(
                f"the files in {self.folder.name!r} changed while they were being scored; keep a checkpoint as it is "
                "until its probes are done"
            )


class WeightsLibrary:
    """The roots of a worker, and the digests of what it has read there.

    Reading tens of gigabytes for a digest takes minutes, so a digest is kept for as long as the files' stamp stays the
    same. Thread-safe.
    """

    def __init__(self, roots: Mapping[str, Path]) -> None:
        self._roots = {name: folder.resolve() for name, folder in roots.items()}
        self._digests: dict[tuple[Path, Stamp], str] = {}
        self._lock = threading.Lock()

    def find(self, checkpoint: AnnouncedCheckpoint) -> Weights:
        """The weights of `checkpoint`.

        Raises UnknownRootError where this worker has no such root; WeightsGoneError where they are missing or in a form
        that needs conversion; WeightsRefusedError where the path is not inside the root or the digest is another.
        """
        root = self._roots.get(checkpoint.root)
        if root is None:
            known = ", ".join(sorted(self._roots)) or "none"
            raise UnknownRootError(
                f"this worker has no weights root {checkpoint.root!r} (it has: {known}); set "
                f"FORESHOCK_WEIGHTS_ROOTS='{checkpoint.root}=/folder/of/checkpoints' where the worker runs"
            )
        if checkpoint.format != LOADABLE_FORMAT:
            raise WeightsGoneError(
                f"needs_conversion: the checkpoint of step {checkpoint.step} is announced as {checkpoint.format!r}; "
                f"only {LOADABLE_FORMAT!r} can be loaded"
            )
        folder = _inside(root, checkpoint.path)
        if not folder.is_dir():
            raise WeightsGoneError(_missing(checkpoint))
        _check_files(root, folder, checkpoint)
        digest, stamp = self._digest(folder)
        if digest != checkpoint.digest:
            raise WeightsRefusedError(
                f"the weights of step {checkpoint.step} at {checkpoint.root}:{checkpoint.path} are not the announced "
                f"ones: announced {checkpoint.digest}, found {digest}"
            )
        return Weights(folder=folder, digest=digest, version=checkpoint.weights_version, stamp=stamp)

    def _digest(self, folder: Path) -> tuple[str, Stamp]:
        stamp = _stamp(folder)
        with self._lock:
            known = self._digests.get((folder, stamp))
        if known is None:
            known = weights_digest(folder)
            with self._lock:
                self._digests[folder, stamp] = known
        return known, stamp


def _inside(root: Path, path: str) -> Path:
    """The folder that `path` names below `root`, links followed; raises WeightsRefusedError where it is elsewhere."""
    relative = PurePosixPath(path)
    if (
        not path
        or "\0" in path
        or relative.is_absolute()
        or PureWindowsPath(path).drive
        or "\\" in path
        or ".." in relative.parts
    ):
        raise WeightsRefusedError(f"a checkpoint's path must be relative to its root and stay inside it, not {path!r}")
    try:
        folder = (root / relative).resolve()
    except (OSError, RuntimeError) as error:
        raise WeightsRefusedError(f"the checkpoint's path {path!r} cannot be followed: {error}") from error
    if not folder.is_relative_to(root):
        raise WeightsRefusedError(f"the checkpoint's path {path!r} leads out of its root through a symbolic link")
    return folder


def _check_files(root: Path, folder: Path, checkpoint: AnnouncedCheckpoint) -> None:
    """Raise where `folder` is no safetensors checkpoint or a file that would be loaded lies outside the root."""
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise WeightsGoneError(f"the checkpoint {checkpoint.path!r} cannot be read: {error.strerror}") from error
    if not any(file.suffix == ".safetensors" for file in files):
        pickled = [file.name for file in files if file.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".distcp")]
        if pickled:
            raise WeightsGoneError(
                f"needs_conversion: {checkpoint.path!r} holds {pickled[0]!r} and no safetensors; pickled weights are "
                "never loaded, convert them to safetensors"
            )
        raise WeightsGoneError(_missing(checkpoint))
    if not (folder / "config.json").is_file():
        raise WeightsGoneError(f"the checkpoint {checkpoint.path!r} has no config.json, so its model is not known")
    for file in files:
        if not file.resolve().is_relative_to(root):
            raise WeightsRefusedError(f"{file.name!r} of the checkpoint {checkpoint.path!r} is a link out of its root")


def _missing(checkpoint: AnnouncedCheckpoint) -> str:
    expired = checkpoint.expires_at_us is not None and checkpoint.expires_at_us <= now_us()
    why = "it was announced to expire before now" if expired else "it may have been moved or deleted"
    return f"the weights of step {checkpoint.step} are not at {checkpoint.root}:{checkpoint.path}; {why}"


def _stamp(folder: Path) -> Stamp:
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json"))
        details = [(path.name, path.stat()) for path in files]
    except OSError as error:
        raise WeightsGoneError(f"the checkpoint {folder.name!r} cannot be read: {error.strerror}") from error
    return tuple((name, detail.st_size, detail.st_ino, detail.st_mtime_ns) for name, detail in details)
