"""Sources of logits: hidden states times the weights of a head, one block of the vocabulary at a time.

Products are rounded to the dtype of hidden states and head (bfloat16 for a bfloat16 model), as torch rounds them. The
distribution is then the trainer's or the engine's; later steps are not rounded. `logits_dtype` float32 omits this
rounding, for an engine that computes its head in float32.
"""

import functools
import math
import os
from dataclasses import dataclass
from typing import Protocol

import torch

_HALF = (torch.bfloat16, torch.float16)
# Values of ONEDNN_MAX_CPU_ISA that exclude bfloat16 products from oneDNN and therefore from torch.
_WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")


class SourceError(ValueError):
    """Invalid or incompatible shapes, dtypes or values of logit sources."""


class Source(Protocol):
    """Logits of T tokens over a vocabulary of V tokens, computed in parts."""

    @property
    def tokens(self) -> int:
        """The number of tokens T."""

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary V."""

    @property
    def device(self) -> torch.device:
        """The device that computes the logits."""

    @property
    def held_in(self) -> torch.dtype:
        """The dtype of a tile of these logits; it holds them exactly."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return the input of `write_logits` for the tokens `start` … `stop`, prepared once per tile."""

    def write_logits(self, rows: torch.Tensor, start: int, stop: int, into: torch.Tensor) -> None:
        """Write the logits of `start` … `stop` of the vocabulary to `into` [rows, stop − start]."""

    def writes_directly(self, dtype: torch.dtype) -> bool:
        """Return True if `write_logits` needs no temporary memory for an `into` of this dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class GivenLogits:
    """Given logits [T, V], for example of a tiny vocabulary; −inf masks a token at one state."""

    logits: torch.Tensor

    def __post_init__(self) -> None:
        if self.logits.ndim != 2 or self.logits.shape[1] == 0 or not self.logits.is_floating_point():
            raise SourceError(f"logits must be floating-point [T, V] with V > 0, got {_described(self.logits)}")

    @property
    def tokens(self) -> int:
        return int(self.logits.shape[0])

    @property
    def vocabulary(self) -> int:
        return int(self.logits.shape[1])

    @property
    def device(self) -> torch.device:
        return self.logits.device

    @property
    def held_in(self) -> torch.dtype:
        if self.device.type == "cpu" and self.logits.dtype == torch.bfloat16:
            return torch.bfloat16
        return torch.promote_types(self.logits.dtype, torch.float32)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.logits[start:stop]

    def write_logits(self, rows: torch.Tensor, start: int, stop: int, into: torch.Tensor) -> None:
        into.copy_(rows[:, start:stop])

    def writes_directly(self, dtype: torch.dtype) -> bool:
        return True


@dataclass(frozen=True, slots=True, eq=False)
class LogitSource:
    """Logits of T tokens: `hidden` [T, H] times `weight` [V, H] transposed, plus `bias` [V].

    Then follow, in this order: rounding to `logits_dtype` (None: the dtype that hidden states and weights promote to),
    the soft cap c·tanh(x/c) with c = `softcap`, each step rounded to that dtype as in models, and division by
    `temperature`, not rounded. A bias of −inf masks a token, unless there is a soft cap. Weights and bias must be on
    one device; H, dtype and device may differ from those of the other source. Float32 products on a GPU are
    TensorFloat-32 if torch's settings allow it. Raises SourceError if shapes, dtypes or devices are incompatible or a
    number is not positive and finite.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    temperature: float = 1.0
    softcap: float | None = None
    logits_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        fitting = self.hidden.ndim == self.weight.ndim == 2 and self.hidden.shape[1] == self.weight.shape[1]
        if not (fitting and self.hidden.is_floating_point() and self.weight.is_floating_point()):
            raise SourceError(
                f"hidden states and head weights must be floating-point [T, H] and [V, H], got "
                f"{_described(self.hidden)} and {_described(self.weight)}"
            )
        if self.weight.shape[0] == 0:
            raise SourceError("the head's weights must have at least 1 row, got 0")
        if self.bias is not None and self.bias.shape != (self.weight.shape[0],):
            raise SourceError(f"the bias must be [{self.weight.shape[0]}], got {list(self.bias.shape)}")
        if self.bias is not None and self.bias.device != self.weight.device:
            raise SourceError(
                f"bias and head weights must be on one device, got {self.bias.device} and {self.weight.device}"
            )
        for name, value in (("temperature", self.temperature), ("soft cap", self.softcap)):
            if value is not None and not (value > 0.0 and math.isfinite(value)):
                raise SourceError(f"{name} must be above 0 and finite, got {value}")

    @property
    def tokens(self) -> int:
        return int(self.hidden.shape[0])

    @property
    def vocabulary(self) -> int:
        return int(self.weight.shape[0])

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def product_dtype(self) -> torch.dtype:
        """The dtype of the product of hidden states and weights in torch."""
        return torch.promote_types(self.hidden.dtype, self.weight.dtype)

    @property
    def rounded_to(self) -> torch.dtype:
        """The dtype of the logits before soft cap and temperature."""
        return self.logits_dtype or self.product_dtype

    @property
    def held_in(self) -> torch.dtype:
        if torch.float64 in (self.product_dtype, self.logits_dtype):
            return torch.float64
        as_they_come = self.rounded_to in (_HALF if self.device.type == "cuda" else (torch.bfloat16,))
        return self.rounded_to if as_they_come and self.temperature == 1.0 else torch.float32

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.hidden[start:stop].to(self.device, self._multiplied_in)

    def write_logits(self, rows: torch.Tensor, start: int, stop: int, into: torch.Tensor) -> None:
        weight = self.weight[start:stop].to(self._multiplied_in)
        out = into if into.dtype == rows.dtype and into.device == rows.device else None
        if self.bias is None:
            logits = torch.mm(rows, weight.T, out=out)
        else:
            logits = torch.addmm(self.bias[start:stop].to(rows.dtype), rows, weight.T, out=out)
        if logits.dtype != self.rounded_to:
            logits = logits.to(self.rounded_to)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if self.temperature != 1.0:
            logits = logits.to(self.held_in) / self.temperature
        if logits.data_ptr() != into.data_ptr():
            into.copy_(logits)

    def writes_directly(self, dtype: torch.dtype) -> bool:
        unchanged = self.softcap is None and self.temperature == 1.0
        return unchanged and self.weight.dtype == self._multiplied_in == self.rounded_to == dtype

    @property
    def _multiplied_in(self) -> torch.dtype:
        """The dtype of the computed product: float32 instead of half precision if the CPU has no half-precision
        products or the product must not be rounded; the result is rounded to `rounded_to` afterwards."""
        if self.product_dtype not in _HALF:
            return self.product_dtype
        rounded_as_multiplied = self.rounded_to == self.product_dtype
        native = self.device.type != "cpu" or _multiplies_halves()
        bias_as_multiplied = self.bias is None or self.bias.dtype == self.product_dtype
        return self.product_dtype if native and rounded_as_multiplied and bias_as_multiplied else torch.float32


def _described(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


@functools.cache
def _multiplies_halves() -> bool:
    """Return True if torch has CPU instructions for bfloat16 products; else float32 is 1.3 to 2.4 times as fast."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _WITHOUT_BFLOAT16:
        return False
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, check, bool)()) for check in checks)
