"""Where logits come from: hidden states times the weights of a head, a block of the vocabulary at a time.

The distribution is that of the trainer or the engine: products are rounded to the dtype of hidden states and head
(bfloat16 for a bfloat16 model), as torch rounds them, and nothing is rounded after that. `logits_dtype` float32 leaves
that rounding out, for an engine that computes its head in float32.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["GivenLogits", "LogitSource", "Source", "SourceError"]

_HALF = (torch.bfloat16, torch.float16)
# Values of ONEDNN_MAX_CPU_ISA that hold oneDNN, and so torch, to instructions without products of bfloat16.
_WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")


class SourceError(ValueError):
    """Shapes, dtypes or values of two logit sources that do not go together."""


class Source(Protocol):
    """What gives the logits of T tokens over V tokens of a vocabulary, a part at a time."""

    @property
    def tokens(self) -> int:
        """T."""

    @property
    def vocabulary(self) -> int:
        """V."""

    @property
    def device(self) -> torch.device:
        """Where the logits are made."""

    @property
    def held_in(self) -> torch.dtype:
        """The dtype in which logits are held until they are reduced: nothing is lost by it."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """What `write_logits` needs to know of the tokens `start` … `stop`, made ready once."""

    def write_logits(self, rows: torch.Tensor, start: int, stop: int, into: torch.Tensor) -> None:
        """Write the logits of `start` … `stop` of the vocabulary to `into` [rows, stop − start]."""

    def writes_directly(self, dtype: torch.dtype) -> bool:
        """Whether `write_logits` needs no other memory if `into` is of this dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class GivenLogits:
    """Logits [T, V] that are already there, as of a tiny vocabulary; −inf masks a token at one state."""

    logits: torch.Tensor

    def __post_init__(self) -> None:
        if self.logits.ndim != 2 or self.logits.shape[1] == 0 or not self.logits.is_floating_point():
            raise SourceError(f"floating-point logits [T, V] are needed, not {_described(self.logits)}")

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
    """The logits of T tokens: `hidden` [T, H] times `weight` [V, H] transposed, plus `bias` [V].

    After that come, in this order, rounding to `logits_dtype` (None: the dtype that hidden states and weights promote
    to), the soft cap c·tanh(x/c) with c = `softcap`, each of its steps rounded to that dtype as models do it, and
    division by `temperature`, which is not rounded. A bias of −inf masks a token, unless there is a soft cap.
    Weights and bias are on one device; H, dtype and device may differ from those of the other source. Products of
    float32 on a GPU are TensorFloat-32 where torch was told to allow them.
    Raises SourceError where the shapes, dtypes or devices do not fit or a number is not positive and finite.
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
                f"floating-point hidden states [T, H] and head weights [V, H] are needed, not "
                f"{_described(self.hidden)} and {_described(self.weight)}"
            )
        if self.weight.shape[0] == 0:
            raise SourceError("the head has no rows: there is no vocabulary")
        if self.bias is not None and self.bias.shape != (self.weight.shape[0],):
            raise SourceError(f"the bias must be [{self.weight.shape[0]}], not {tuple(self.bias.shape)}")
        if self.bias is not None and self.bias.device != self.weight.device:
            raise SourceError(f"the bias is on {self.bias.device}, and the head's weights are on {self.weight.device}")
        for name, value in (("temperature", self.temperature), ("soft cap", self.softcap)):
            if value is not None and not (value > 0.0 and math.isfinite(value)):
                raise SourceError(f"the {name} must be above 0 and finite, and is {value}")

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
        """In which hidden states and weights are multiplied, as torch would."""
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
        """Half precision is multiplied in float32 where the processor has no products of its own for it, and where
        the product must not be rounded: the values are the same ones, only less or more rounded."""
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
    """Whether torch has instructions for products of bfloat16; without them float32 is 1.3 to 2.4 times as fast."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _WITHOUT_BFLOAT16:
        return False
    questions = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, question, bool)()) for question in questions)
