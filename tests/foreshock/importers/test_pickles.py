"""A pickle runs no code, whatever it contains: any name but those of tensors and plain data is refused."""

import io
import os
import pickle
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foreshock.errors import ConfigurationError, InvalidRolloutsError
from foreshock.importers import FORMATS, ReadOptions, find_dumps, pickles
from foreshock.importers.pickles import read_pickled
from foreshock.rollouts.schema import DecodeLimits
from tests.foreshock.importers.make_dumps import DUMPS

LIMITS = DecodeLimits()


class Calls:
    """Pickles as a call of a function, the way an attack does."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def as_pickle(path: Path, value: Any) -> Path:
    path.write_bytes(pickle.dumps(value))
    return path


def as_pt(path: Path, value: Any) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value, protocol=2))
        archive.writestr("archive/byteorder", "little")
    return path


@pytest.mark.parametrize("kind", ["pickle", "pt"])
@pytest.mark.parametrize("attack", ["shell", "eval", "open", "socket", "in a sample"])
def test_malicious_pickle_does_nothing(tmp_path: Path, kind: Any, attack: str) -> None:
    written = tmp_path / "written"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        address = server.getsockname()
        attacks: dict[str, Callable[[], Any]] = {
            "shell": lambda: Calls(os.system, f"touch {written}"),
            "eval": lambda: Calls(eval, f"open({str(written)!r}, 'w').write('x')"),
            "open": lambda: Calls(open, str(written), "w"),
            "socket": lambda: Calls(socket.create_connection, address),
            "in a sample": lambda: {"rollout_id": 1, "samples": [{"tokens": Calls(os.system, f"touch {written}")}]},
        }
        value = attacks[attack]()
        file = (as_pickle if kind == "pickle" else as_pt)(tmp_path / "1.pt", value)
        with pytest.raises(InvalidRolloutsError, match=r"1\.pt cannot be imported: it has the name .* no plain data"):
            read_pickled(file, kind, ["tokens"], LIMITS, allowed=True)
        with pytest.raises(TimeoutError):
            server.accept()
    assert not written.exists()
    # The attack is real: pickle itself runs it.
    if attack == "shell" and kind == "pickle":
        pickle.loads(file.read_bytes())
        assert written.exists()


def test_pickles_need_permission_and_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    for folder, name in (("slime", "slime"), ("skyrl", "skyrl")):
        dump = find_dumps(name, DUMPS / folder)[0]
        with pytest.raises(ConfigurationError, match=r"is a pickle, which may contain code\. With --allow-pickle"):
            FORMATS[name].read(dump, ReadOptions())


def test_nothing_of_the_environment_reaches_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_API_KEY", "secret")
    started: list[Any] = []
    popen = subprocess.Popen

    def start(*words: Any, **options: Any) -> Any:
        started.append(options["env"])
        return popen(*words, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    read_pickled(DUMPS / "slime" / "train_data" / "1.pt", "pt", ["tokens"], LIMITS, allowed=True)
    assert set(started[0]) == {"PYTHONPATH", "OMP_NUM_THREADS", "LC_ALL"}


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
)
def test_tensors_are_read_as_torch_reads_them(tmp_path: Path, dtype: str) -> None:
    base = (torch.arange(24).reshape(4, 6) * 1.37 - 9).to(getattr(torch, dtype))
    # A row of a larger tensor, one with a stride, an empty one, and one that needs a gradient.
    tensors = [base[1], base.t()[2], base[0, :0], base[3, 1::2]]
    path = tmp_path / "1.pt"
    torch.save({"rollout_id": 1, "samples": [{"tokens": tensor} for tensor in tensors]}, path)
    rows, metadata = read_pickled(path, "pt", ["tokens"], LIMITS, allowed=True)
    assert metadata["rollout_id"] == 1
    expected = [tensor.to(torch.float64).tolist() for tensor in tensors]
    assert [[float(item) for item in row] for row in (each["tokens"] for each in rows)] == expected


def test_numpy_arrays_and_unknown_objects_of_a_framework_are_read_around(tmp_path: Path) -> None:
    sample = {
        "tokens": np.arange(5, dtype=np.int32),
        "rollout_routed_experts": np.zeros((4, 2, 2), np.int32),
        "reward": np.float64(0.5),
        "multimodal_inputs": {"images": [Path("/x")]},
        "metadata": {"nested": [1, 2, {"a": None}]},
    }
    path = tmp_path / "1.pt"
    torch.save({"rollout_id": 1, "samples": [sample]}, path)
    rows, _ = read_pickled(path, "pt", ["tokens", "reward"], LIMITS, allowed=True)
    assert rows == [{"tokens": [0, 1, 2, 3, 4], "reward": 0.5}]


def test_memory_of_the_process_is_limited(tmp_path: Path) -> None:
    path = as_pickle(tmp_path / "1.pkl", Calls(bytearray, 1 << 40))
    with pytest.raises(InvalidRolloutsError, match="needs more than 8 GiB of memory"):
        read_pickled(path, "pickle", ["tokens"], LIMITS, allowed=True)


def test_process_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "_WALL_SECONDS", 1)
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    path = as_pickle(tmp_path / "1.pkl", {})
    with pytest.raises(InvalidRolloutsError, match="took more than 1 s"):
        read_pickled(path, "pickle", [], LIMITS, allowed=True)


def test_half_written_files_are_refused_as_such(tmp_path: Path) -> None:
    whole = (DUMPS / "slime" / "train_data" / "1.pt").read_bytes()
    path = tmp_path / "1.pt"
    for size in (0, 100, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidRolloutsError, match=r"1\.pt cannot be imported: it is no complete file"):
            read_pickled(path, "pt", ["tokens"], LIMITS, allowed=True)


MUTATIONS = """
import io, random, sys, warnings
from foreshock.importers.unpickling import json_lines, load_pickle, load_pt

warnings.simplefilter("ignore")
paths = sys.argv[1:]
contents = [open(path, "rb").read() for path in paths]
counts = {"read": 0, "refused": 0}
for seed in range(1000):
    source = random.Random(seed)
    content = bytearray(contents[seed % len(contents)])
    for _ in range(source.choice([1, 1, 4, 40])):
        where = source.randrange(len(content))
        kind = source.randrange(3)
        if kind == 0:
            content[where] = source.randrange(256)
        elif kind == 1:
            del content[where : where + source.randrange(1, 50)]
        else:
            content[where:where] = content[: source.randrange(50)]
    load = load_pt if paths[seed % len(paths)].endswith(".pt") else load_pickle
    try:
        json_lines(load(io.BytesIO(bytes(content))), ["tokens", "log_probs", "sequences", "loss_mask"])
        counts["read"] += 1
    except Exception:
        counts["refused"] += 1
print(counts["read"], counts["refused"])
"""


def test_damaged_pickles_neither_crash_nor_hang(tmp_path: Path) -> None:
    files = [DUMPS / "slime" / "train_data" / "1.pt", DUMPS / "slime" / "rollout_data" / "45.pt",
             DUMPS / "skyrl" / "dumped_data" / "global_step_1_training_input.pkl"]  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-c", MUTATIONS, *map(str, files)], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    read, refused = map(int, ended.stdout.split())
    assert read + refused == 1000
    assert refused > 100


def test_bytes_of_the_process_are_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "_CHILD", "this")  # prints a text
    with pytest.raises(InvalidRolloutsError, match="returned no table"):
        read_pickled(as_pickle(tmp_path / "1.pkl", {}), "pickle", [], LIMITS, allowed=True)


def test_a_tensor_outside_its_storage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "1.pt"
    torch.save({"rollout_id": 1, "samples": [{"tokens": torch.arange(4)}]}, path)
    content = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(content) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    storage = next(name for name in parts if name.endswith("data/0"))
    parts[storage] = parts[storage][:16]
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    with pytest.raises(InvalidRolloutsError, match="larger than its storage"):
        read_pickled(path, "pt", ["tokens"], LIMITS, allowed=True)


def test_torch_is_not_needed(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not installed')\n")
    program = (
        "from pathlib import Path\n"
        "from foreshock.importers import FORMATS, ReadOptions, find_dumps\n"
        "for name in ('slime', 'skyrl'):\n"
        f"    dump = find_dumps(name, Path({str(DUMPS)!r}) / name)[0]\n"
        "    print(FORMATS[name].read(dump, ReadOptions(allow_pickle=True)).batches[0].num_rollouts)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env={"PYTHONPATH": path}
    )
    assert ended.stdout.split() == ["8", "8"], ended.stderr
