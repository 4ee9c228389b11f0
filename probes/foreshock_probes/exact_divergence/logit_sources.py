"""Sources of logits: given ones, and hidden states times the weights of a head.

Products are rounded to the dtype of hidden states and head (bfloat16 for a bfloat16 model), as torch rounds them. The
distribution is then the trainer's or the engine's; later steps are not rounded.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch


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

    def logits(self, start: int, stop: int) -> torch.Tensor:
        """Return the logits [stop − start, V] of the tokens `start` … `stop`."""


@dataclass(frozen=True, slots=True, eq=False)
class GivenLogits:
    """Given logits [T, V], for example of a tiny vocabulary; −inf masks a token at one state."""

    given: torch.Tensor

    def __post_init__(self) -> None:
        if self.given.ndim != 2 or self.given.shape[1] == 0 or not self.given.is_floating_point():
            raise SourceError(f"logits must be floating-point [T, V] with V > 0, got {_described(self.given)}")

    @property
    def tokens(self) -> int:
        return int(self.given.shape[0])

    @property
    def vocabulary(self) -> int:
        return int(self.given.shape[1])

    def logits(self, start: int, stop: int) -> torch.Tensor:
        return self.given[start:stop]


@dataclass(frozen=True, slots=True, eq=False)
class LogitSource:
    """Logits of T tokens: `hidden` [T, H] times `weight` [V, H] transposed, plus `bias` [V].

    Then follow the soft cap c·tanh(x/c) with c = `softcap`, each step rounded to the dtype that hidden states and
    weights promote to, as in models, and division by `temperature`, not rounded. A bias of −inf masks a token, unless
    there is a soft cap. Weights and bias must be on one device; H, dtype and device may differ from those of the other
    source. Float32 products on a GPU are TensorFloat-32 if torch's settings allow it. Raises SourceError if shapes,
    dtypes or devices are incompatible or a number is not positive and finite.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    temperature: float = 1.0
    softcap: float | None = None

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
    def dtype(self) -> torch.dtype:
        """The dtype to which the logits are rounded, before the temperature."""
        return torch.promote_types(self.hidden.dtype, self.weight.dtype)

    def logits(self, start: int, stop: int) -> torch.Tensor:
        hidden = self.hidden[start:stop].to(self.weight.device, self.dtype)
        bias = None if self.bias is None else self.bias.to(self.dtype)
        logits = torch.nn.functional.linear(hidden, self.weight.to(self.dtype), bias)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if self.temperature != 1.0:
            logits = logits.to(torch.promote_types(self.dtype, torch.float32)) / self.temperature
        return logits


def _described(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
