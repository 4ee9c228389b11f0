"""Compare a process held to an instruction set with a CPU that has only that instruction set.

The other CPU is this one with CPUID instructions answered as by a lower CPU (`cpuid_mask.c`): torch, oneDNN, MKL and
vLLM then select their kernels themselves, and the process is not held. Both processes multiply matrices, compute
attention, and score the shipped run's last step with torch and vLLM. The last row compares an AMD CPU with AVX2 with a
process held to AVX2 and MKL's SSE4.2 kernels, the nearest to AMD's; it omits float32 products.

Bar: the same bits everywhere, and the same fingerprint in the fields on the instruction set. Needs Linux, a C compiler,
and an Intel CPU that can intercept CPUID (the flag cpuid_fault); without these it prints the reason and exits with 2.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.recorded_runs import shipped_run
from foreshock.digests import weights_digest
from foreshock.fingerprint import Fingerprint
from foreshock.hardware import cpu_flags
from foreshock.instruction_sets import InstructionSet, MklKernels
from foreshock.scorers import default_scorers
from foreshock_probes.engines.environment import EngineEnvironment, available_instruction_sets, hold_this_process
from foreshock_probes.engines.process import process_variables
from foreshock_probes.scorers.request import ScoreRequest, WarmModel
from foreshock_probes.scorers.table import scorer_named

SOURCE = Path(__file__).with_name("cpuid_mask.c")
SCORERS = tuple(sorted(default_scorers()))
PRODUCTS = ((1, 96, 96), (128, 96, 96), (512, 96, 256), (2048, 16, 96), (300, 300, 300), (64, 1024, 1024))
KEYS = (16, 48, 61, 96, 128, 192)
MOST_BYTES = 1 << 28
ABOUT_INSTRUCTIONS = ("cpu_features", "bfloat16_conversion")

Arrays = dict[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Computed:
    """Arrays that a process computed, and the fields of its scores' fingerprints on the instruction set."""

    arrays: Arrays
    fields: object


def compute() -> tuple[Arrays, list[Fingerprint]]:
    """Return products, attention and scores, by name, and the fingerprints of the scores."""
    import torch

    arrays: Arrays = {}
    for dtype in (torch.float32, torch.bfloat16):
        for m, n, k in PRODUCTS:
            random = torch.Generator().manual_seed(m + n + k)
            left, right = (torch.randn(shape, generator=random).to(dtype) for shape in ((m, k), (n, k)))
            product = torch.nn.functional.linear(left, right)
            arrays[f"product {dtype} {m}x{n}x{k}"] = product.float().numpy()
    for keys in KEYS:
        random = torch.Generator().manual_seed(keys)
        query, key, value = (torch.randn((64, 4, keys, 32), generator=random).bfloat16() for _ in range(3))
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        arrays[f"attention {keys}"] = attended.float().numpy()
    run = shipped_run()
    step = run.steps()[-1]
    fingerprints = []
    for scorer in SCORERS:
        folder = run.checkpoint(step)
        request = ScoreRequest(scorer, "", run.rollouts(step), folder, weights_digest(folder))
        scored = scorer_named(scorer).load()(request, WarmModel(), lambda tokens: None)
        arrays[f"score {scorer}"] = scored.log_probs
        fingerprints.append(scored.fingerprint)
    return arrays, fingerprints


def run_child(into: Path) -> None:
    """Compute in this process, held to the environment of its variables."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, MOST_BYTES))  # if the mask fails, the log has no end
    hold_this_process()
    arrays, fingerprints = compute()
    fields = [
        [each.engine, each.cpu_isa, *(each.flags.get(name) for name in ABOUT_INSTRUCTIONS)] for each in fingerprints
    ]
    np.savez(into, allow_pickle=False, fields=np.array(json.dumps(fields)), **arrays)


def computed_with(variables: dict[str, str], folder: Path) -> Computed:
    """Return the results of a process with these environment variables."""
    into = folder / "computed.npz"
    command = [sys.executable, "-m", "benchmarks.held_processes", str(into)]
    with (folder / "log").open("wb") as log:
        done = subprocess.run(command, env=variables, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"exit status {done.returncode}: {(folder / 'log').read_text(errors='replace')[-2000:]}")
    with np.load(into) as found:
        arrays = dict(found)
    return Computed(arrays, json.loads(str(arrays.pop("fields"))))


@contextmanager
def mask() -> Iterator[Path]:
    """Build the library that masks CPUID instructions."""
    with tempfile.TemporaryDirectory(prefix="foreshock-mask-") as folder:
        built = Path(folder) / "cpuid_mask.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(built), str(SOURCE)], check=True)
        yield built


def difference(held: Computed, other: Computed, omitted: str) -> list[str]:
    """Return the names of the arrays that differ in any bit."""
    names = [name for name in other.arrays if not (omitted and omitted in name)]
    return [name for name in names if held.arrays[name].tobytes() != other.arrays[name].tobytes()]


def main() -> int:
    """Print a row for each instruction set of this CPU."""
    if "cpuid_fault" not in cpu_flags() or shutil.which("cc") is None or os.environ.get("LD_PRELOAD"):
        print("needs Linux on an Intel CPU with the flag cpuid_fault, a C compiler, and no LD_PRELOAD of its own")
        return 2
    print(f"{'instruction set':<18}{'compared':>9}{'different':>10}  {'fingerprint':<12}what differs")
    total = failed = 0
    with mask() as library, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        near_amd = EngineEnvironment(InstructionSet.AVX2, MklKernels.SSE4_2)
        environments = [EngineEnvironment(each) for each in available_instruction_sets()]
        for environment in (*environments, near_amd):
            assert environment.instruction_set is not None
            as_amd = environment == near_amd
            masked = process_variables() | {
                "LD_PRELOAD": str(library),
                "MASK_LEVEL": str(list(InstructionSet).index(environment.instruction_set)),
                **({"MASK_AMD": "1"} if as_amd else {}),
            }
            other = computed_with(masked, folder)
            held = computed_with(process_variables(environment), folder)
            omitted = "float32" if as_amd else ""
            differs = difference(held, other, omitted)
            compared = sum(not (omitted and omitted in name) for name in other.arrays)
            label = environment.instruction_set.value + (" of AMD" if as_amd else "")
            same = held.fields == other.fields
            what = ", ".join(differs) + ("" if same else f" {held.fields} against {other.fields}")
            print(
                f"{label:<18}{compared:>9}{len(differs):>10}  {'the same' if same else 'OTHER':<12}{what}", flush=True
            )
            total += compared
            failed += len(differs) + (not same)
    print(f"instruction_sets={len(environments)} compared={total} different={failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_child(Path(sys.argv[1]))
    else:
        sys.exit(main())
