"""Digests of the tensors that an inference engine holds, under the checkpoint's names.

Engines fuse tensors (qkv_proj, gate_up_proj), shard them over tensor-parallel ranks and pad embeddings. The layers of
vLLM and SGLang, which have a common origin, describe this in the same attributes. They are read here without importing
an engine. Quantised weights and stacked experts have no counterpart in the checkpoint: they keep the engine's name, and
are not compared with the trainer's. `packed_modules_mapping` names the parts of a fused layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from foreshock.notary.digests import Part, pieces_of
from foreshock.notary.pieces import Piece, joined
from foreshock.parsing import parse_json

if TYPE_CHECKING:
    import torch

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_COLUMNS = ("input_size_per_partition", "input_size", "embedding_dim")
_ROWS_AT_ONCE = 1024


class WorkerExtension:
    """Mixed into vLLM's worker class: `worker_extension_cls="foreshock.notary.engines.WorkerExtension"`."""

    def foreshock_weights(self) -> dict[str, list[Piece]]:
        """Return the digests of the weights that this worker holds."""
        return held_by_worker(self)


def held_by_worker(worker: Any) -> dict[str, list[Piece]]:
    """Return the digests of the weights that a worker of vLLM holds, for `collective_rpc`."""
    return held_by(worker.get_model())


def ask_vllm(engine: Any, method: str | Callable[[Any], Any] = "foreshock_weights") -> dict[str, list[Piece]]:
    """Return what a `vllm.LLM` with `WorkerExtension` holds; for an engine in this process pass `held_by_worker`."""
    return of_ranks(engine.collective_rpc(method))


def of_ranks(reports: Iterable[Mapping[str, Iterable[Iterable[Any]]]]) -> dict[str, list[Piece]]:
    """Join the pieces of vLLM's workers, which arrive from other processes as lists."""
    return joined({name: [Piece(*each) for each in pieces] for name, pieces in rank.items()} for rank in reports)


def ask_sglang(url: str, timeout_seconds: float = 60.0) -> dict[str, list[Piece]]:
    """Return what an SGLang server holds; `foreshock` must be installed in its environment to add the digests.

    Raises ValueError if the server returns only its own checksums, and httpx's errors.
    """
    import httpx

    answer = httpx.post(
        f"{url.rstrip('/')}/weights_checker", json={"action": "foreshock"}, timeout=timeout_seconds, trust_env=False
    )
    if answer.status_code != httpx.codes.OK:
        raise ValueError(
            f"the SGLang server at {url} has no digests of Foreshock ({answer.text[:200]}); install foreshock in its "
            "environment, or log a canary prompt instead"
        )
    return of_sglang(parse_json(answer.content))


def of_sglang(answer: Mapping[str, Any]) -> dict[str, list[Piece]]:
    """Return the pieces in SGLang's answer to the action `foreshock` of `/weights_checker`."""
    return joined(_unpacked(rank["checksums"]) for rank in answer["ranks"])


def add_to_sglang() -> None:
    """Add the action `foreshock` to SGLang's checker of weights: an entry point of the group `sglang.srt.plugins`."""
    from sglang.srt.utils import weight_checker

    def handle(checker: Any, action: str, *arguments: Any, **named: Any) -> Any:
        if action != "foreshock":
            return own(checker, action, *arguments, **named)
        checksums = _packed(held_by(checker._get_model()))
        place = checker._parallelism_info(role=named["role"])
        return weight_checker.ChecksumInfo(
            checksums=checksums, per_gpu_checksum=weight_checker.overall_checksum(checksums), parallelism_info=place
        ).model_dump()

    own = weight_checker.WeightChecker.handle
    weight_checker.WeightChecker.handle = handle


def _packed(tensors: Mapping[str, list[Piece]]) -> dict[str, str]:
    """Return the pieces as texts: SGLang's answer has one text for each tensor."""
    return {name: ";".join(",".join(map(str, each)) for each in pieces) for name, pieces in tensors.items()}


def _unpacked(checksums: Mapping[str, str]) -> dict[str, list[Piece]]:
    return {
        name: [Piece(dtype, *map(int, numbers)) for dtype, *numbers in (each.split(",") for each in text.split(";"))]
        for name, text in checksums.items()
    }


def held_by(model: Any) -> dict[str, list[Piece]]:
    """Return the digests of a model of vLLM or SGLang, of this process's rank, by the checkpoint's names."""
    import torch

    with torch.no_grad():
        parts = list(_parts(model))
        ranks = {getattr(module, "tp_rank", 0) for module in model.modules()}
        return pieces_of(parts, rank=max(ranks))


def _parts(model: Any) -> Iterator[Part]:
    fused = {**_FUSED, **dict(getattr(model, "packed_modules_mapping", None) or {})}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, kind = name.rpartition(".")
        module = modules[path]
        path = path.replace(".base_layer", "")
        parent, _, last = path.rpartition(".")
        names = [f"{parent}.{part}.{kind}".lstrip(".") for part in fused.get(last, (last,))]
        for values in _places(module, kind, parameter):
            yield from _split(module, values.data, names, is_bias=kind == "bias")


def _split(module: Any, values: Any, names: list[str], *, is_bias: bool) -> Iterator[Part]:
    """Yield the parts of a parameter, with their places in the checkpoint's tensors."""
    rank, shards = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
    if len(names) == 3 and hasattr(module, "num_kv_head_replicas"):
        heads, keys, size = module.num_heads, module.num_kv_heads, module.head_size
        rows = (heads * size, keys * size, keys * getattr(module, "v_head_size", size))
        of_keys = rank // module.num_kv_head_replicas
        for name, part, place in zip(names, values.split(rows), (rank, of_keys, of_keys), strict=True):
            yield Part(name, part, row=place * part.shape[0])
    elif len(names) > 1 and len(names) == len(getattr(module, "output_sizes", ())):
        for name, part in zip(names, values.split([size // shards for size in module.output_sizes]), strict=True):
            yield Part(name, part, row=rank * part.shape[0])
    elif hasattr(module, "shard_indices"):
        start, stop = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
        yield Part(names[0], values[: stop - start], row=start)
    elif len(names) == 1 and _is_split(module, "output_size"):
        yield Part(names[0], values, row=rank * values.shape[0])
    elif len(names) == 1 and _is_split(module, "input_size") and not is_bias:
        yield Part(names[0], values, column=rank * values.shape[1])
    else:
        # A fused layer of unknown layout stays whole, under the joined names of its parts, which no trainer announces.
        yield Part("+".join(names), values)


def _is_split(module: Any, size: str) -> bool:
    of_rank = getattr(module, f"{size}_per_partition", None)
    return of_rank is not None and of_rank != getattr(module, size)


def _places(module: Any, kind: str, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the values of a parameter from each place in which the engine keeps them."""
    if parameter.numel():
        yield parameter
    if kind == "weight" and is_packed(module):
        yield read_through_kernel(module)


def is_packed(module: Any) -> bool:
    """Return True if vLLM on a CPU keeps this layer's weights packed for a kernel, perhaps beside unpacked ones."""
    return hasattr(module, "cpu_linear") and hasattr(getattr(module, "quant_method", None), "apply")


def read_through_kernel(module: Any) -> torch.Tensor:
    """Return the weights [out, in] of a linear layer as its kernel applies them, by applying it to the identity matrix.

    Exact, because each output is one product with 1 and sums of zeros; a denormal or −0 may be returned as 0. This
    costs about as much as scoring as many tokens as the model has hidden units.
    """
    import torch

    columns = next((getattr(module, name) for name in _COLUMNS if hasattr(module, name)), None)
    if not isinstance(columns, int):
        raise ValueError(f"{type(module).__name__} does not say how many inputs its packed weights have")
    pieces = []
    for start in range(0, columns, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, columns)
        basis = torch.zeros(stop - start, columns, dtype=module.weight.dtype)
        basis[torch.arange(stop - start), torch.arange(start, stop)] = 1
        pieces.append(module.quant_method.apply(module, basis, None))
    return torch.cat(pieces).t()
