"""Run the Triton kernel in Triton's interpreter over the hard logits, or compile it for GPUs.

A program of its own, because Triton decides at import whether to interpret:
`TRITON_INTERPRET=1 python -m tests.probes.exact_divergence.interpreted OUT.npz`, or without OUT to compile.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import torch

from foreshock_probes.exact_divergence import ExactDivergences, GivenLogits, divergences, exact_divergences
from foreshock_probes.exact_divergence.triton_reduction import TritonReduction
from tests.probes.exact_divergence.reference import TOP_KS, Pair, hard_cases

VOCABULARIES = (2, 1100)


def cases() -> dict[str, Pair]:
    """Return all inputs of the kernel's tests: hard cases, invalid logits, bfloat16 and more than one lane sum."""
    found = {f"{name} [{size}]": pair for size in VOCABULARIES for name, pair in hard_cases(size, rows=1).items()}
    plain, _ = found["ordinary mismatch [1100]"]
    invalid = plain.repeat(2, 1)
    invalid[0, 700] = torch.nan
    invalid[1] = -torch.inf
    found["invalid"] = (invalid, plain.repeat(2, 1))
    of_bfloat16, and_behaviour = (logits.bfloat16() for logits in hard_cases(1100, rows=2)["ordinary mismatch"])
    found["bfloat16 [1100]"] = (of_bfloat16, and_behaviour)
    found["many blocks"] = hard_cases(9_000, rows=1)["ordinary mismatch"]
    found["identical"] = (plain, plain.clone())
    return found


def by_triton(target: torch.Tensor, behaviour: torch.Tensor) -> ExactDivergences:
    """Return the divergences of two logits as computed on a GPU, on this CPU."""
    divergences._reduction_of = lambda tiles, top_k: TritonReduction(*tiles, top_k)
    return exact_divergences(GivenLogits(target), GivenLogits(behaviour), top_ks=TOP_KS, tile_tokens=2)


def interpret(out: Path) -> None:
    arrays = {}
    for name, pair in cases().items():
        for field, value in dataclasses.asdict(by_triton(*pair)).items():
            if isinstance(value, np.ndarray):
                arrays[f"{name}: {field}"] = value
    np.savez(out, allow_pickle=False, **arrays)


def compile_for_gpus() -> None:
    """Compile the kernel to machine code of Ampere and Hopper; this needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from foreshock_probes.exact_divergence.triton_reduction import BLOCK, reduce_rows

    sizes = {"TOP": 20, "SLOTS": 32, "BLOCK": BLOCK}
    for capability, logits in ((80, "*fp32"), (90, "*bf16")):
        signature = {"target": logits, "behaviour": logits, "stride": "i32", "vocabulary": "i32", "sums": "*fp64"}
        signature |= {"normalisers": "*fp64", "top_values": "*fp32", "top_ids": "*i32"}
        source = ASTSource(reduce_rows, signature=signature | dict.fromkeys(sizes, "constexpr"), constexprs=sizes)
        options = {"num_warps": 8, "enable_fp_fusion": True}
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert len(made.asm["cubin"]) > 0


if __name__ == "__main__":
    interpret(Path(sys.argv[1])) if len(sys.argv) > 1 else compile_for_gpus()
