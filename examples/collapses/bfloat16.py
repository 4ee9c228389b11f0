"""Products of bfloat16 matrices on a CPU that has no instructions for them.

There torch multiplies with a plain loop, ten times as slow as float32. CPUs with the instructions sum in float32 and
round once. `round_once` makes torch do the same on the others: a run takes a fourth of the CPU time. Forward pass,
gradient and engine call the same products, so that it changes rounding alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@cache
def round_once() -> bool:
    """Let products of bfloat16 matrices sum in float32 in this process. Returns whether the CPU needed that."""
    import torch

    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    # `out` is filled by torch's own kernels, which stay as they are.
    aten = torch.ops.aten

    def product(operator: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def kernel(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            out = torch.empty((*left.shape[:-1], right.shape[-1]), dtype=_summed_in(left))
            operator(left.to(out.dtype), right.to(out.dtype), out=out)
            return out.to(left.dtype)

        return kernel

    def addmm(
        added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> torch.Tensor:
        out = torch.empty((left.shape[0], right.shape[1]), dtype=_summed_in(left))
        operands = (each.to(out.dtype) for each in (added, left, right))
        aten.addmm.out(*operands, beta=beta, alpha=alpha, out=out)
        return out.to(left.dtype)

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # That the operators have kernels already.
        warnings.simplefilter("ignore")
        for name, kernel in (("mm", product(aten.mm.out)), ("bmm", product(aten.bmm.out)), ("addmm", addmm)):
            library.impl(name, kernel, "CPU")  # type: ignore[no-untyped-call]
    # The kernels go when the library does.
    _LIBRARIES.append(library)
    return True


_LIBRARIES: list[torch.library.Library] = []


def _summed_in(matrix: torch.Tensor) -> torch.dtype:
    import torch

    return torch.float32 if matrix.dtype is torch.bfloat16 else matrix.dtype
