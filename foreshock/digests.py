"""SHA-256 digests of bodies, JSON values, sets of rollouts and weights, written `sha256:<64 hexadecimal digits>`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from foreshock.errors import WeightsError

_CHUNK_BYTES = 4 << 20


def digest_of_bytes(data: bytes | bytearray | memoryview) -> str:
    """Return the digest of bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def canonical_json(value: Any) -> str:
    """Return `value` as canonical JSON: sorted keys, no spaces, unescaped UTF-8, no NaN or infinity.

    Raises ValueError if a float is not finite, TypeError if a value has no JSON form.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_of_json(value: Any) -> str:
    """Return the digest of the canonical JSON of `value`, which does not depend on the order of keys."""
    return digest_of_bytes(canonical_json(value).encode())


def rollout_set_digest(sample_ids: Iterable[str]) -> str:
    """Return the digest of a set of rollouts by their sample ids, in any order."""
    digest = hashlib.sha256()
    for sample_id in sorted(sample_id.encode() for sample_id in sample_ids):
        # The length in front keeps {"ab", "c"} and {"a", "bc"} apart.
        digest.update(len(sample_id).to_bytes(8, "little"))
        digest.update(sample_id)
    return "sha256:" + digest.hexdigest()


def weights_digest(folder: str | Path) -> str:
    """Return the digest of a Hugging Face checkpoint: name, size and content of `*.safetensors` and `config.json`.

    A LoRA adapter has no `config.json`: its `adapter_config.json`, with its scale, counts instead. Other files, such as
    those of the tokenizer, do not change the model and are left out. Raises WeightsError if the folder or its
    safetensors are missing or cannot be read.
    """
    root = Path(folder)
    try:
        files = {path.name for path in root.iterdir()}
        configuration = "config.json" if "config.json" in files else "adapter_config.json"
        names = sorted(name for name in files if name.endswith(".safetensors") or name == configuration)
        if not any(name.endswith(".safetensors") for name in names):
            raise WeightsError(f"{root.name!r} holds no *.safetensors file: save the weights as safetensors")
        digest = hashlib.sha256()
        for name in names:
            _add_file(digest, root / name)
    except OSError as error:
        raise WeightsError(f"the weights in {root.name!r} cannot be read: {error.strerror or error}") from error
    return "sha256:" + digest.hexdigest()


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    """Add a file's name, size and content to `digest`."""
    encoded_name = path.name.encode()
    digest.update(len(encoded_name).to_bytes(8, "little"))
    digest.update(encoded_name)
    digest.update(path.stat().st_size.to_bytes(8, "little"))
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
