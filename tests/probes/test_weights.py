"""An announced checkpoint is loaded only if it is inside its root, in safetensors, with the announced digest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from foreshock.api.leases import JobWeightsRecord
from foreshock.digests import weights_digest
from foreshock.errors import WeightsError
from foreshock_probes.weights import (
    UnknownRootError,
    WeightsGoneError,
    WeightsLibrary,
    WeightsRefusedError,
)
from tests.probes.tiny import save_checkpoint


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


NAME = "model.layers.0.self_attn.q_proj"


def make_adapter(root: Path, base: str = "base", **settings: object) -> torch.Tensor:
    """Turn the announced checkpoint into an adapter of a model in `base`; return what it adds to q_proj of layer 0."""
    folder = root / "run" / "step_1"
    for file in folder.iterdir():
        file.unlink()
    if not (root / "base").exists():
        save_checkpoint(root / "base", seed=1)
    generator = torch.Generator().manual_seed(1)
    down, up = (torch.randn(shape, generator=generator) for shape in ((2, 32), (64, 2)))
    prefix = f"base_model.model.{NAME}"
    save_file({f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": 2,
        "lora_alpha": 8,
        "target_modules": [NAME],
    }
    (folder / "adapter_config.json").write_text(json.dumps({**described, **settings}))
    return 4.0 * (up @ down)


def q_proj(folder: Path) -> torch.Tensor:
    """Return the weights of q_proj of layer 0 in a checkpoint."""
    found: torch.Tensor = load_file(folder / "model.safetensors")[f"{NAME}.weight"]
    return found


def test_adapter_is_merged_with_its_base_model_below_the_root(root: Path, request: pytest.FixtureRequest) -> None:
    delta = make_adapter(root)
    library = WeightsLibrary({"runs": root})
    request.addfinalizer(library.close)
    found = library.find(announce(root))
    assert found.digest == weights_digest(root / "run" / "step_1")
    plain = q_proj(root / "base")
    torch.testing.assert_close(q_proj(found.folder), plain + delta)
    assert (found.folder / "config.json").is_file()
    assert library.find(announce(root)).folder == found.folder
    found.check_unchanged()
    make_adapter(root, lora_alpha=16)
    with pytest.raises(WeightsRefusedError, match="changed during scoring"):
        found.check_unchanged()
    assert library.find(announce(root)).digest != found.digest
    torch.testing.assert_close(q_proj(library.find(announce(root)).folder), plain + 2.0 * delta)


def test_a_second_merged_adapter_leaves_the_folder_of_the_first(root: Path, request: pytest.FixtureRequest) -> None:
    """An examination replays the adapters of two steps in turn."""
    make_adapter(root)
    library = WeightsLibrary({"runs": root})
    request.addfinalizer(library.close)
    first = library.find(announce(root))
    make_adapter(root, lora_alpha=16)
    second = library.find(announce(root))

    assert first.folder != second.folder
    assert not torch.equal(q_proj(first.folder), q_proj(second.folder))


def test_adapter_without_its_base_model_below_the_root_says_where_to_put_it(root: Path, tmp_path: Path) -> None:
    for base in ("Qwen/Qwen3-4B", "../outside", str(tmp_path)):
        make_adapter(root, base)
        with pytest.raises(WeightsGoneError, match=r"needs_conversion: the adapter 'step_1' belongs to .*merge_and_"):
            WeightsLibrary({"runs": root}).find(announce(root))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"peft_type": "IA3"}, "has peft_type='IA3'"),
        ({"r": None}, "PEFT cannot load the adapter"),
        ({"target_modules": ["k_proj"]}, "describe other tensors, such as"),
        ({"use_dora": True}, "describe other tensors, such as .*lora_magnitude_vector"),
    ],
)
def test_adapter_that_cannot_be_merged_is_skipped_with_the_reason(
    root: Path, settings: dict[str, Any], reason: str
) -> None:
    make_adapter(root, **settings)
    with pytest.raises(WeightsGoneError, match=f"needs_conversion: .*{reason}"):
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
