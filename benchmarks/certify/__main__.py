"""`foreshock certify` on real engines: planted changes, pairs that are the same, repetitions, and its time.

    make bench-certify
    python -m benchmarks.certify planted|same|against|time …

Each certificate is made by the command, in processes of its own. `planted`: one change a certificate, in a patched
engine or trainer. `same`: certificates of three architectures without a change; all rows are pairs that are the same.
`against`: 20 pairs of certificates of one model and release. The certificates are kept in build/certify, and a second
run reads them.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bars import Line, report_parts
from benchmarks.certify.faults import PLANTED, Planted
from benchmarks.certify.models import save_model
from foreshock.certify.certificate import Certificate, read_certificate
from foreshock.certify.compare import compare

BUILD = Path(__file__).parents[2] / "build" / "certify"
PATCHED = Path(__file__).parent / "patched"
REPETITIONS = 20
SEED = 3
FEW = ("--rollouts", "16", "--tokens", "32")
SAME_KINDS = ("qwen3", "moe", "qwen2")


def certified(name: str, kind: str, *options: str, planted: str = "", model_seed: int = SEED) -> Certificate:
    """Return the certificate `name` of a model, made by the command unless it is there."""
    model, out = BUILD / "models" / f"{kind}-{model_seed}", BUILD / f"{name.replace(' ', '-').replace(':', '')}.json"
    if not model.exists():
        save_model(kind, model, model_seed)
    if not out.exists():
        temporary = out.with_suffix(".part")
        paths = os.pathsep.join(
            [*([str(PATCHED)] if planted else []), os.environ.get("PYTHONPATH", ""), str(Path.cwd())]
        )
        command = [sys.executable, "-m", "foreshock_probes.certify.command", str(model), "--out", str(temporary)]
        done = subprocess.run(
            [*command, "--longest", "256", *options],
            env={**os.environ, "PYTHONPATH": paths, "FORESHOCK_PLANTED": planted},
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 1) or not temporary.exists():
            raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
        temporary.rename(out)
    return read_certificate(out)


def planted() -> Sequence[Line]:
    """Certify with one planted change at a time."""
    found = named = 0
    for name, fault in PLANTED.items():
        different, causes = judged(fault)
        right = bool(set(causes) & set(fault.causes))
        found, named = found + bool(different), named + right
        print(
            f"{name:34} {'different' if different else 'MISSED':10} {'right' if right else 'other cause':12} "
            f"{', '.join(causes) or 'no cause'} [{', '.join(different)}]",
            flush=True,
        )
    return [
        Line("different", "planted changes that are different", found, 19, at_least=True),
        Line("right_cause", "planted changes with the right cause", named, 15, at_least=True),
    ]


def judged(fault: Planted) -> tuple[list[str], list[str]]:
    """Return the rows that are different with a planted change, and their causes."""
    certificate = certified(
        f"planted {fault.name}", fault.model, "--rows", *fault.rows, "--explain", "cause", *FEW, planted=fault.name
    )
    different = [row for row in certificate.rows if row.verdict == "different"]
    return [row.name for row in different], sorted({row.cause or "none" for row in different})


def same() -> Sequence[Line]:
    """Certify without any change."""
    rows = [
        (kind, row) for kind in SAME_KINDS for row in certified(f"same {kind}", kind).rows if row.verdict != "not tried"
    ]
    wrong = [(kind, row) for kind, row in rows if row.verdict == "different"]
    for kind, row in wrong:
        print(f"{kind}: {row.name}: {row.sentence} {' '.join(row.why)}")
    return [
        Line("pairs", "pairs that are the same", len(rows), 40, at_least=True),
        Line("false", "of them different", len(wrong), 0),
    ]


def against() -> Sequence[Line]:
    """Compare certificates of one model, made with other seeds of sampling."""
    rows = ("trainer/vllm.prefill", "prefill", "sampling", "mixed", "temperature", "top_p")
    made = [
        certified(f"against {seed}", "qwen3", "--rows", *rows, *FEW, "--explain", "none", "--seed", str(1000 * seed))
        for seed in range(7)
    ]
    pairs = list(itertools.combinations(made, 2))[:REPETITIONS]
    moved = [each for new, old in pairs for each in compare(new, old)]
    for each in moved:
        print(f"{each.change}: {each.row}: {each.sentence}")
    return [
        Line("repetitions", "repetitions", len(pairs), REPETITIONS, at_least=True),
        Line("moved", "rows that became worse or better", len(moved), 0),
    ]


def seconds() -> Sequence[Line]:
    """Certify a model of ten million parameters under all conditions."""
    certificate = certified("time", "ten_million", "--budget", "1h")
    print(f"{certificate.parameters:,} parameters, {len(certificate.rows)} conditions: {certificate.ended}")
    return [Line("seconds", "seconds of a model of 10 M parameters, all conditions", certificate.seconds, 600)]


if __name__ == "__main__":
    sys.exit(report_parts({"same": same, "planted": planted, "against": against, "time": seconds}, sys.argv[1:]))
