"""Numbers and percentages as findings show them."""

from __future__ import annotations

import math

__all__ = ["format_number", "format_percent", "format_signed_percent"]


def format_number(value: float) -> str:
    """Return three significant digits, plain or scientific, with U+2212 as the minus sign."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞" if value < 0 else "not estimable"
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−") if abs(value) < 1000 else f"{value:,.0f}".replace("-", "−")


def format_percent(part: float, whole: float) -> str:
    """Return `part` of `whole` as a percentage; 0 % if `whole` is 0."""
    return f"{format_number(100.0 * part / whole)} %" if whole else "0 %"


def format_signed_percent(share: float) -> str:
    """Return a share as a percentage with its sign."""
    return f"{'+' if share > 0 else '−'}{format_number(100.0 * abs(share))} %"
