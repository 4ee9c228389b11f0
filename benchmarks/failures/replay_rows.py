"""Failures of a replay: it scores other weights than were served."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.failures.rows import Outcome, Row
from tests.probes.adapted import replayed, save_adapter
from tests.probes.tiny import save_checkpoint


def _lora_replay_in_bfloat16() -> Outcome:
    with tempfile.TemporaryDirectory(prefix="foreshock-failures-") as name:
        base = save_checkpoint(Path(name) / "base", seed=1)
        found = replayed(base, save_adapter(Path(name) / "adapter", base), Path(name))
    prefill, decode, merged = (found.k3(each) for each in (found.prefill, found.decode, found.merged))
    seen = f"k3 prefill {prefill:.1e}, decode {decode:.1e}, rounding {found.rounding:.1e} (merged: {merged:.1e})"
    return Outcome(seen, max(prefill, decode) <= found.rounding)


ROWS = [
    Row("lora-replay-in-bfloat16", "k3 to the engine's own scores within its rounding", _lora_replay_in_bfloat16),
]
