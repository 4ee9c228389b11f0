"""An announced checkpoint is loaded only if it is inside its root, in safetensors, with the announced digest."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import state_dict_saver

from foreshock.api.leases import JobWeightsRecord
from foreshock.digests import weights_digest
from foreshock.errors import WeightsError
from foreshock_probes.weights import UnknownRootError, Weights, WeightsGoneError, WeightsLibrary, WeightsRefusedError
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
        "root": "runs", "path": path, "step": 1, "digest": weights_digest(root / "run" / "step_1"),
    }  # fmt: skip
    return JobWeightsRecord(**(values | fields))


def find(root: Path, path: str = "run/step_1", **fields: Any) -> Weights:
    return WeightsLibrary({"runs": root}).find(announce(root, path, **fields))


def test_the_announced_checkpoint_is_found(root: Path) -> None:
    weights = find(root, weights_version=7)
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
        find(root, path)


@given(parts=st.lists(st.sampled_from(["..", ".", "run", "step_1", "outside", "", "/", "~", "link"]), max_size=6))
def test_no_path_reaches_a_folder_outside_the_root(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    base = tmp_path_factory.getbasetemp() / "no-escape"
    root = base / "root"
    if not base.exists():
        write_checkpoint(root / "run" / "step_1")
        write_checkpoint(base / "outside")
        (root / "link").symlink_to(base / "outside")
    try:
        found = find(root, "/".join(parts))
    except WeightsError:
        return
    assert found.folder.is_relative_to(root.resolve())


def test_links_out_of_the_root_are_refused_and_those_inside_are_followed(root: Path) -> None:
    outside = write_checkpoint(root.parent / "outside")
    (root / "link").symlink_to(outside)
    write_checkpoint(root / "linked")
    (root / "linked" / "model.safetensors").unlink()
    (root / "linked" / "model.safetensors").symlink_to(outside / "model.safetensors")
    for path, words in (("link", "symbolic link"), ("linked", r"model\.safetensors")):
        with pytest.raises(WeightsRefusedError, match=words):
            find(root, path)
    (root / "latest").symlink_to(root / "run" / "step_1")
    (root.parent / "alias").symlink_to(root)
    assert find(root.parent / "alias", "latest").folder.name == "step_1"


def test_different_digest_raises_and_does_not_tell_the_true_one(root: Path) -> None:
    wrong = "sha256:" + "0" * 64
    with pytest.raises(WeightsRefusedError) as caught:
        find(root, digest=wrong)
    assert wrong in str(caught.value)
    assert weights_digest(root / "run" / "step_1").removeprefix("sha256:") not in str(caught.value)


def test_missing_weights_raise_weights_gone(root: Path) -> None:
    with pytest.raises(WeightsGoneError, match="moved or deleted"):
        find(root, "run/step_2")
    (root / "run" / "step_1" / "config.json").unlink()
    with pytest.raises(WeightsGoneError, match=r"config\.json"):
        find(root)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("wrapped", [True, False])
def test_folder_of_torchs_distributed_checkpoint_is_converted_by_the_named_command(root: Path, wrapped: bool) -> None:
    """torch's own checkpoint, as FSDP trainers save it, and the command of the refusal."""
    source, folder, out = root / "run" / "step_1", root / "shards", root / "merged"
    save_checkpoint(source, 1)
    state = load_file(source / "model.safetensors")
    state_dict_saver.save({"model": state} if wrapped else state, checkpoint_id=folder)
    with pytest.raises(WeightsGoneError, match=r"needs_conversion: 'shards' has '__0_0\.distcp'") as caught:
        find(root, "shards")
    (command,) = re.findall(r"run `(accelerate merge-weights) FOLDER OUT`, copy config.json", str(caught.value))
    program = [Path(sys.executable).parent / command.split()[0], command.split()[1], folder, out]
    subprocess.run([str(word) for word in program], check=True, capture_output=True)
    shutil.copy(source / "config.json", out)
    merged = load_file(out / "model.safetensors")
    assert merged.keys() == state.keys()
    assert all(torch.equal(merged[name], state[name]) for name in state)
    digest = weights_digest(out)
    assert find(root, "merged", digest=digest).folder == out


@pytest.mark.parametrize(
    ("names", "command"),
    [
        (("__0_0.distcp", "common.pt"), "tools/convert_torch_dist_to_hf.py"),
        (("model_world_size_8_rank_0.pt",), "verl.model_merger merge --backend fsdp"),
        (("pytorch_model.bin",), "safe_serialization=True"),
    ],
)
def test_each_format_names_its_conversion(root: Path, names: tuple[str, ...], command: str) -> None:
    (root / "other").mkdir()
    for name in names:
        (root / "other" / name).write_bytes(b"x")
    with pytest.raises(WeightsGoneError, match=command):
        find(root, "other")


def test_other_formats_need_conversion_and_pickled_weights_are_never_opened(root: Path) -> None:
    with pytest.raises(WeightsGoneError, match=r"needs_conversion.*fsdp"):
        find(root, format="fsdp")
    for name in ("pytorch_model.bin", "model.pt", "weights.pkl", "__0_0.distcp"):
        folder = root / name.partition(".")[0]
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / name).write_bytes(b"\x80\x04cos\nsystem\n")
        with pytest.raises(WeightsGoneError, match="needs_conversion"):
            find(root, folder.name)


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
        "peft_type": "LORA", "base_model_name_or_path": base, "r": 2, "lora_alpha": 8, "target_modules": [NAME],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps({**described, **settings}))
    return 4.0 * (up @ down)


def q_proj(folder: Path) -> torch.Tensor:
    """Return the weights of q_proj of layer 0 in a checkpoint."""
    found: torch.Tensor = load_file(folder / "model.safetensors")[f"{NAME}.weight"]
    return found


def test_adapter_is_merged_with_its_base_model_below_the_root(root: Path) -> None:
    delta = make_adapter(root)
    library = WeightsLibrary({"runs": root})
    found = library.find(announce(root))
    assert found.digest == weights_digest(root / "run" / "step_1")
    plain = q_proj(root / "base")
    assert (found.folder, found.adapter) == (root / "base", root / "run" / "step_1")
    found.merge(root / "merged")
    torch.testing.assert_close(q_proj(root / "merged"), plain + delta)
    assert (root / "merged" / "config.json").is_file()
    found.check_unchanged()
    make_adapter(root, lora_alpha=16)
    with pytest.raises(WeightsRefusedError, match="changed during scoring"):
        found.check_unchanged()
    second = library.find(announce(root))
    assert second.digest != found.digest
    second.merge(root / "again")
    torch.testing.assert_close(q_proj(root / "again"), plain + 2.0 * delta)


def test_adapter_without_its_base_model_below_the_root_says_where_to_put_it(root: Path, tmp_path: Path) -> None:
    for base in ("Qwen/Qwen3-4B", "../outside", str(tmp_path)):
        make_adapter(root, base)
        with pytest.raises(WeightsGoneError, match=r"needs_conversion: the adapter 'step_1' belongs to .*merge_and_"):
            find(root)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"r": None}, "PEFT cannot load the adapter"),
        ({"target_modules": ["k_proj"]}, "describe other tensors, such as"),
        ({"use_dora": True}, "describe other tensors, such as .*lora_magnitude_vector"),
    ],
)
def test_adapter_that_cannot_be_merged_is_skipped_and_said(root: Path, settings: dict[str, Any], reason: str) -> None:
    make_adapter(root, **settings)
    found = find(root)
    with pytest.raises(WeightsGoneError, match=f"needs_conversion: .*{reason}"):
        found.merge(root / "merged")


def test_adapter_of_another_kind_is_skipped_with_the_reason(root: Path) -> None:
    make_adapter(root, peft_type="IA3")
    with pytest.raises(WeightsGoneError, match=r"needs_conversion: .*has peft_type='IA3'"):
        find(root)


def test_root_is_used_for_its_projects_only(root: Path) -> None:
    for root_name, project, found in (
        ("runs", "default", True),
        ("runs", "team", False),
        ("runs", "", False),
        ("runs@team", "team", True),
        ("runs@team", "default", False),
        ("runs@*", "team", True),
        ("runs@*", "", True),
    ):
        library = WeightsLibrary({root_name: root, "secret-root": root})
        if found:
            assert library.find(announce(root), project).digest
            continue
        with pytest.raises(UnknownRootError, match=f"'{project}'; set FORESHOCK_WEIGHTS_ROOTS") as caught:
            library.find(announce(root), project)
        assert "secret-root" not in str(caught.value)


def test_weights_replaced_during_scoring_raise(root: Path) -> None:
    weights = find(root)
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
