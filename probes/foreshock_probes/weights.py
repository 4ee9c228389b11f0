"""Find the weights of an announced checkpoint and verify that they may be loaded.

An announcement comes from a client, so it is never used directly as a path. It names a root, which the worker's own
configuration maps to a folder for certain projects, and a relative path, which must stay inside that folder after
symbolic links are resolved. Only safetensors are loaded, and only if their digest equals the announced one.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from foreshock.api.leases import JobWeightsRecord
from foreshock.digests import weights_digest
from foreshock.errors import WeightsError
from foreshock.page_addresses import DEFAULT_PROJECT
from foreshock_probes.adapters import AdapterError, base_of, is_adapter, merge
from foreshock_probes.scorers.request import UnsupportedScoreError

LOADABLE_FORMAT = "hf_safetensors"
EVERY_PROJECT = "*"


class WeightsGoneError(WeightsError):
    """The checkpoint is missing or has a format that cannot be loaded; the probe is skipped."""


class WeightsRefusedError(WeightsError):
    """The checkpoint must not be used: its digest differs from the announced one, or its path leaves its root."""


class UnknownRootError(WeightsError):
    """This worker has no root of that name for the project; another worker may have it."""


Stamp = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """Verified weights, which may be loaded from `folder`.

    `stamp` has name, size, inode and modification time (ns) of each file of the announced folder at the
    time of verification. If an adapter was announced, `folder` holds its base model and `adapter` is its own folder.
    """

    folder: Path
    digest: str
    version: int | None
    stamp: Stamp
    adapter: Path | None = None

    @property
    def announced(self) -> Path:
        """The folder that was announced and verified."""
        return self.adapter or self.folder

    def merge(self, into: Path) -> None:
        """Write the base model with the adapter merged to `into`. Raises WeightsGoneError if they cannot be merged."""
        assert self.adapter is not None
        try:
            merge(self.adapter, self.folder, into)
        except (AdapterError, UnsupportedScoreError) as error:
            raise WeightsGoneError(f"needs_conversion: {error}") from error

    def check_unchanged(self) -> None:
        """Raise WeightsRefusedError if a file was replaced after verification; later scores are invalid."""
        if _stamp(self.announced) != self.stamp:
            raise WeightsRefusedError(
                f"the files in {self.announced.name!r} changed during scoring; keep a checkpoint unchanged until its "
                "probes are done"
            )


_MERGER = "python -m verl.model_merger merge --backend {} --local_dir FOLDER --target_dir OUT"
_CONVERSIONS = {
    "dcp": "run `accelerate merge-weights FOLDER OUT`, copy config.json to OUT, and announce OUT",
    "fsdp": f"run `{_MERGER.format('fsdp')}` (verl), or, for a folder with .distcp files, `accelerate merge-weights "
    "FOLDER OUT`, and announce OUT",
    "megatron": "run `python tools/convert_torch_dist_to_hf.py --input-dir FOLDER --output-dir OUT --origin-hf-dir "
    f"MODEL` (slime), or `{_MERGER.format('megatron')}` (verl), and announce OUT",
    "pickle": "load them in the trainer, `save_pretrained(OUT, safe_serialization=True)`, and announce OUT",
}
"""The command that makes a folder of safetensors of a checkpoint, by its format."""


class WeightsLibrary:
    """The weights roots of a worker, with a cache of digests.

    Roots are `name` (for the project `default`), `name@project`, or `name@*` (for every project). The project sees the
    message of a refusal, so it names neither the other roots nor the digest that was found.

    The digest of tens of gigabytes takes minutes, so it is reused as long as the files' stamp is the same.
    """

    def __init__(self, roots: Mapping[str, Path]) -> None:
        self._roots = {name: folder.resolve() for name, folder in roots.items()}
        self._digests: dict[tuple[Path, Stamp], str] = {}

    def find(self, checkpoint: JobWeightsRecord, project: str = DEFAULT_PROJECT) -> Weights:
        """Return the verified weights of `checkpoint`, announced by a run of `project`.

        Raises UnknownRootError if this worker has no such root, WeightsGoneError if the weights are missing or need
        conversion, WeightsRefusedError if the path is not inside the root or the digest differs.
        """
        root = self._root_of(checkpoint.root, project)
        if checkpoint.format != LOADABLE_FORMAT:
            raise WeightsGoneError(
                f"needs_conversion: the checkpoint of step {checkpoint.step} is announced as {checkpoint.format!r}; "
                f"only {LOADABLE_FORMAT!r} can be loaded: {_CONVERSIONS[checkpoint.format]}"
            )
        folder = _inside(root, checkpoint.path)
        if not folder.is_dir():
            raise WeightsGoneError(_missing(checkpoint))
        try:
            model = _model_of(root, folder, checkpoint)
        except AdapterError as error:
            raise WeightsGoneError(f"needs_conversion: {error}") from error
        stamp = _stamp(folder)
        if (folder, stamp) not in self._digests:
            self._digests[folder, stamp] = weights_digest(folder)
        digest = self._digests[folder, stamp]
        if digest != checkpoint.digest:
            raise WeightsRefusedError(
                f"the weights of step {checkpoint.step} at {checkpoint.root}:{checkpoint.path} are not the announced "
                f"ones: their digest is not {checkpoint.digest}; announce weights again after they were replaced"
            )
        return Weights(model, digest, checkpoint.weights_version, stamp, None if model == folder else folder)

    def _root_of(self, name: str, project: str) -> Path:
        own = [f"{name}@{project}", f"{name}@{EVERY_PROJECT}"]
        if project == DEFAULT_PROJECT:
            own.insert(0, name)
        for root in own:
            if root in self._roots:
                return self._roots[root]
        raise UnknownRootError(
            f"this worker has no weights root {name!r} for the project {project!r}; set "
            f"FORESHOCK_WEIGHTS_ROOTS='{own[0]}=/folder/of/checkpoints' where the worker runs"
        )


def _inside(root: Path, path: str) -> Path:
    """Return the folder `path` below `root`, links resolved. Raises WeightsRefusedError if it is outside `root`."""
    relative = PurePosixPath(path)
    is_outside = relative.is_absolute() or PureWindowsPath(path).drive or ".." in relative.parts
    if is_outside or not path or "\0" in path or "\\" in path:
        raise WeightsRefusedError(f"a checkpoint's path must be relative to its root and stay inside it, got {path!r}")
    try:
        folder = (root / relative).resolve()
    except (OSError, RuntimeError) as error:
        raise WeightsRefusedError(f"the checkpoint's path {path!r} cannot be resolved: {error}") from error
    if not folder.is_relative_to(root):
        raise WeightsRefusedError(f"the checkpoint's path {path!r} leads out of its root through a symbolic link")
    return folder


def _model_of(root: Path, folder: Path, checkpoint: JobWeightsRecord) -> Path:
    """Return the folder of the checkpoint's model, `folder` or that of an adapter's base.

    Raises WeightsError if it is no safetensors checkpoint or a file that would be loaded is outside the root.
    """
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise WeightsGoneError(f"the checkpoint {checkpoint.path!r} cannot be read: {error.strerror}") from error
    if not any(file.suffix == ".safetensors" for file in files):
        pickled = [file.name for file in files if file.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".distcp")]
        if pickled:
            raise WeightsGoneError(
                f"needs_conversion: {checkpoint.path!r} has {pickled[0]!r} and no safetensors; pickled weights are "
                f"never loaded: {_CONVERSIONS[_format_of({file.name for file in files})]}"
            )
        raise WeightsGoneError(_missing(checkpoint))
    model = _base_of(root, folder) if is_adapter(folder) else folder
    if not (model / "config.json").is_file():
        raise WeightsGoneError(f"the checkpoint {checkpoint.path!r} has no config.json; save it next to the weights")
    _refuse_links(root, folder)
    return model


def _format_of(names: Collection[str]) -> str:
    """Return the format of a checkpoint without safetensors, by the names of its files."""
    if any(name.endswith(".distcp") for name in names):
        # Megatron writes what is not sharded beside the shards.
        return "megatron" if "common.pt" in names else "dcp"
    return "fsdp" if any(re.fullmatch(r"model_world_size_\d+_rank_\d+\.pt", name) for name in names) else "pickle"


def _refuse_links(root: Path, folder: Path) -> None:
    for file in folder.iterdir():
        if not file.resolve().is_relative_to(root):
            raise WeightsRefusedError(f"{file.name!r} of the checkpoint {folder.name!r} is a link that leaves its root")


def _base_of(root: Path, adapter: Path) -> Path:
    """Return the folder of an adapter's model, which must be below the same root."""
    name = base_of(adapter)
    folder = (root / name).resolve()
    if not folder.is_relative_to(root) or not (folder / "config.json").is_file():
        raise WeightsGoneError(
            f"needs_conversion: the adapter {adapter.name!r} belongs to {name!r}, which is no folder of a model below "
            "its root; put the base model there and name it in adapter_config.json, or announce the merged model "
            "(peft: `model.merge_and_unload().save_pretrained(folder)`)"
        )
    _refuse_links(root, folder)
    return folder


def _missing(checkpoint: JobWeightsRecord) -> str:
    return (
        f"there are no weights of step {checkpoint.step} at {checkpoint.root}:{checkpoint.path}; they may have been "
        "moved or deleted"
    )


def _stamp(folder: Path) -> Stamp:
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json"))
        details = [(path.name, path.stat()) for path in files]
    except OSError as error:
        raise WeightsGoneError(f"the checkpoint {folder.name!r} cannot be read: {error.strerror}") from error
    return tuple((name, detail.st_size, detail.st_ino, detail.st_mtime_ns) for name, detail in details)
