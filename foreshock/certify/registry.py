"""The registry: certificates by engine, release, dtype, hardware and model, as references for a run's mismatch.

A certificate is near a run if engine, dtype, hardware, kernels and kind of model are equal, and the release is the
run's, or the nearest one that differs by at most one minor release. What is unknown is not equal.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from foreshock.certify.certificate import Certificate, read_certificate
from foreshock.environment import Environment, differences
from foreshock.fingerprint import Fingerprint
from foreshock.model_kind import ModelKind

_HERE = Path(__file__).resolve().parent
REGISTRY: Final = next(path for path in (_HERE / "certificates", _HERE.parents[1] / "registry") if path.is_dir())
"""The folder of certificates: at the top of the repository; a wheel carries it inside this package."""
_FARTHEST_MINOR = 1


def entry_of(certificate: Certificate) -> Certificate:
    """Return a certificate as the registry keeps it: without tokens, and without the sums of single prompts."""
    rows = (replace(row, sizes=tuple(replace(size, prompts=()) for size in row.sizes)) for row in certificate.rows)
    kept = (*_scorers(certificate), "trainer base")
    fingerprints = {name: each for name, each in certificate.fingerprints.items() if name in kept}
    return replace(certificate, rows=tuple(rows), fingerprints=fingerprints, token_sets={})


@functools.cache
def entries() -> tuple[Certificate, ...]:
    """Return all certificates of the registry, by the names of their files."""
    return tuple(read_certificate(path) for path in sorted(REGISTRY.glob("*.json")))


def engine_of(certificate: Certificate) -> Fingerprint | None:
    """Return the fingerprint of the engine that was certified; None if no row could be tried."""
    known = _scorers(certificate)
    found = next((each for name, each in certificate.fingerprints.items() if name in known), None)
    return None if found is None else Fingerprint.from_dict(found)


def _scorers(certificate: Certificate) -> tuple[str, ...]:
    """Return the scorers of the engine, without their options."""
    return tuple(each.partition(":")[0] for each in certificate.engines)


def near(engine: Fingerprint, model_kind: ModelKind | None, among: Iterable[Certificate]) -> Sequence[Certificate]:
    """Return the certificates near to an engine with a model of a kind, all of one release; often there is none."""
    if model_kind is None or engine.dtype is None:
        return ()
    wanted, release = _comparable(engine), _numbers(engine.engine_version)
    by_release: dict[tuple[int, ...], list[Certificate]] = {}
    for each in among:
        own = engine_of(each)
        if own is None or each.model_kind != model_kind or own.dtype != engine.dtype:
            continue
        if not differences(wanted, _comparable(own), same_engine=True):
            by_release.setdefault(_numbers(own.engine_version), []).append(each)
    reached = [each for each in by_release if _distance(each, release)[0] <= _FARTHEST_MINOR]
    return by_release[min(reached, key=lambda each: _distance(each, release))] if reached else ()


def _comparable(engine: Fingerprint) -> Environment:
    """Return hardware, engine and settings without releases, of which the nearest counts."""
    return replace(Environment.of_fingerprint(engine), driver="", engine_version="", torch_version="")


def _numbers(release: str | None) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release or "")[:3]))


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[float, ...]:
    """Return by how many minor releases two releases differ, and by how much in the rest; of other majors, infinity."""
    if len(one) < 3 or len(other) < 3 or one[0] != other[0]:
        return (float("inf"),)
    return abs(one[1] - other[1]), abs(one[2] - other[2]), one < other
