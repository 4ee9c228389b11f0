"""An announced checkpoint is loaded only if it is inside its root, in safetensors, with the announced digest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.api.leases import JobWeightsRecord
from foreshock.digests import weights_digest
from foreshock.errors import WeightsError
from foreshock_probes.weights import (
    UnknownRootError,
    WeightsGoneError,
    WeightsLibrary,
    WeightsRefusedError,
)


def write_checkpoint(folder: Path, content: bytes = b"weights") -> Path:
    """Write files with the names of a checkpoint's; their content does not matter for digests."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "root" / "run" / "step_1")
    return tmp_path / "root"


def announce(root: Path, path: str = "run/step_1", **fields: Any) -> JobWeightsRecord:
    values: dict[str, Any] = {
        "root": "runs",
        "path": path,
        "step": 1,
        "digest": weights_digest(root / "run" / "step_1"),
    }
    return JobWeightsRecord(**(values | fields))


def test_the_announced_checkpoint_is_found(root: Path) -> None:
    weights = WeightsLibrary({"runs": root}).find(announce(root, weights_version=7))
    assert weights.folder == (root / "run" / "step_1").resolve()
    assert weights.version == 7
    weights.check_unchanged()


@pytest.mark.parametrize(
    "path",
    ["../outside", "run/../../outside", "/etc", "", "run\\..\\..\\outside", "C:/weights", "run/step_1\0", "run/.."],
)
def test_path_outside_the_root_raises(root: Path, path: str) -> None:
    write_checkpoint(root.parent / "outside")
    with pytest.raises(WeightsRefusedError):
        WeightsLibrary({"runs": root}).find(announce(root, path))


@given(parts=st.lists(st.sampled_from(["..", ".", "run", "step_1", "outside", "", "/", "~", "link"]), max_size=6))
def test_no_path_reaches_a_folder_outside_the_root(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    base = tmp_path_factory.getbasetemp() / "no-escape"
    root = base / "root"
    if not base.exists():
        write_checkpoint(root / "run" / "step_1")
        write_checkpoint(base / "outside")
        (root / "link").symlink_to(base / "outside")
    try:
        found = WeightsLibrary({"runs": root}).find(announce(root, "/".join(parts)))
    except WeightsError:
        return
    assert found.folder.is_relative_to(root.resolve())


def test_symbolic_link_out_of_the_root_raises(root: Path) -> None:
    (root / "link").symlink_to(write_checkpoint(root.parent / "outside"))
    with pytest.raises(WeightsRefusedError, match="symbolic link"):
        WeightsLibrary({"runs": root}).find(announce(root, "link"))


def test_weights_file_linked_out_of_the_root_raises(root: Path) -> None:
    outside = write_checkpoint(root.parent / "outside")
    linked = root / "linked"
    linked.mkdir()
    (linked / "config.json").write_text("{}")
    (linked / "model.safetensors").symlink_to(outside / "model.safetensors")
    with pytest.raises(WeightsRefusedError, match=r"model\.safetensors"):
        WeightsLibrary({"runs": root}).find(announce(root, "linked"))


def test_links_that_stay_inside_the_root_are_followed(root: Path) -> None:
    (root / "latest").symlink_to(root / "run" / "step_1")
    assert WeightsLibrary({"runs": root}).find(announce(root, "latest")).folder.name == "step_1"


def test_a_root_may_be_a_link_itself(root: Path) -> None:
    (root.parent / "alias").symlink_to(root)
    assert WeightsLibrary({"runs": root.parent / "alias"}).find(announce(root)).digest


def test_different_digest_raises_and_does_not_tell_the_true_one(root: Path) -> None:
    wrong = "sha256:" + "0" * 64
    with pytest.raises(WeightsRefusedError) as caught:
        WeightsLibrary({"runs": root}).find(announce(root, digest=wrong))
    assert wrong in str(caught.value)
    assert weights_digest(root / "run" / "step_1").removeprefix("sha256:") not in str(caught.value)


def test_missing_weights_raise_weights_gone(root: Path) -> None:
    with pytest.raises(WeightsGoneError, match="moved or deleted"):
        WeightsLibrary({"runs": root}).find(announce(root, "run/step_2"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl", "__0_0.distcp"])
def test_pickled_weights_need_conversion_and_are_never_opened(root: Path, name: str) -> None:
    folder = root / "pickled"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / name).write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(WeightsGoneError, match="needs_conversion"):
        WeightsLibrary({"runs": root}).find(announce(root, "pickled"))


def test_another_announced_format_needs_conversion(root: Path) -> None:
    with pytest.raises(WeightsGoneError, match=r"needs_conversion.*fsdp"):
        WeightsLibrary({"runs": root}).find(announce(root, format="fsdp"))


def test_checkpoint_without_config_raises(root: Path) -> None:
    (root / "run" / "step_1" / "config.json").unlink()
    with pytest.raises(WeightsGoneError, match=r"config\.json"):
        WeightsLibrary({"runs": root}).find(announce(root))


def test_adapter_is_named_as_such_with_its_base_model(root: Path) -> None:
    folder = root / "run" / "step_1"
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-4B"}')
    with pytest.raises(WeightsGoneError, match=r"needs_conversion: .* a LoRA adapter of 'Qwen/Qwen3-4B', .*merge_and_"):
        WeightsLibrary({"runs": root}).find(announce(root))
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(WeightsGoneError, match=r"a model that its adapter_config\.json does not name"):
        WeightsLibrary({"runs": root}).find(announce(root))


def test_error_for_unknown_root_names_the_setting(root: Path) -> None:
    with pytest.raises(UnknownRootError, match="FORESHOCK_WEIGHTS_ROOTS"):
        WeightsLibrary({"other": root}).find(announce(root))


@pytest.mark.parametrize(
    ("root_name", "project", "found"),
    [
        ("runs", "default", True),
        ("runs", "team", False),
        ("runs", "", False),
        ("runs@team", "team", True),
        ("runs@team", "default", False),
        ("runs@*", "team", True),
        ("runs@*", "", True),
    ],
)
def test_root_is_used_for_its_projects_only(root: Path, root_name: str, project: str, found: bool) -> None:
    library = WeightsLibrary({root_name: root, "secret-root": root})
    if found:
        assert library.find(announce(root), project).digest
        return
    with pytest.raises(UnknownRootError, match=f"for the project '{project}'") as caught:
        library.find(announce(root), project)
    assert "secret-root" not in str(caught.value)


def test_weights_replaced_during_scoring_raise(root: Path) -> None:
    weights = WeightsLibrary({"runs": root}).find(announce(root))
    shutil.rmtree(weights.folder)
    write_checkpoint(weights.folder, b"others!")
    with pytest.raises(WeightsRefusedError, match="changed"):
        weights.check_unchanged()


def test_digest_is_recomputed_if_files_changed(root: Path) -> None:
    library = WeightsLibrary({"runs": root})
    announced = announce(root)
    library.find(announced)
    (root / "run" / "step_1" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(WeightsRefusedError, match="not the announced ones"):
        library.find(announced)
