"""What certificates of a run's engine show: a fact beside the run's own mismatch, never a judgement on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from foreshock.certify.certificate import Certificate, Size
from foreshock.certify.registry import engine_of, entries, near
from foreshock.diagnosis.wording import number, percent, plural
from foreshock.environment import Environment
from foreshock.fingerprint import Fingerprint
from foreshock.model_kind import ModelKind
from foreshock.scorers import ENGINE_DECODE

_ROW = f"trainer/{ENGINE_DECODE}"
_KINDS: Mapping[ModelKind, str] = {"dense": "dense models", "moe": "mixtures of experts"}
_SHARE, _FEWEST_FOR_SHARE = 0.95, 20
"""From so many certificates on, the end of this share is told; of fewer, the largest."""


def reference_sentence(engine: Fingerprint | None, model_kind: ModelKind | None) -> str | None:
    """Return what the certificates nearest to a run's engine have in common; None if none is near."""
    found = () if engine is None else near(engine, model_kind, entries())
    sizes = [(each, size) for each in found if (size := _size_of(each)) is not None]
    if not sizes or model_kind is None:
        return None
    return _sentence([each for each, _ in sizes], [size.k3 for _, size in sizes], model_kind)


def _size_of(certificate: Certificate) -> Size | None:
    row = certificate.row(_ROW)
    return row.sizes[0] if row is not None and row.sizes and math.isfinite(row.sizes[0].k3) else None


def _sentence(found: Sequence[Certificate], values: Sequence[float], model_kind: ModelKind) -> str:
    engine = engine_of(found[0])
    assert engine is not None
    ordered, count = sorted(values), len(values)
    is_share = count >= _FEWEST_FOR_SHARE
    end = ordered[math.ceil(_SHARE * count) - 1] if is_share else ordered[-1]
    parameters = [each.parameters / 1e6 for each in found]
    return (
        f"Of {plural(count, 'certificate')} of {engine.engine} {engine.engine_version} on "
        f"{Environment.of_fingerprint(engine).describe()} in {engine.dtype} ({_KINDS[model_kind]} of "
        f"{' to '.join(dict.fromkeys([f'{min(parameters):.1f}', f'{max(parameters):.1f}']))} million parameters), "
        f"{percent(_SHARE) if is_share else 'all'} have k3 of at most {number(end)} against "
        f"{' or '.join(sorted({each.trainer for each in found}))}."
    )
