"""The recorded runs of the demo, and the commands that made them.

    python -m examples.demo.records collapsed --output my-run

trains one anew; `examples.tiny_rl.pack` copies its steps and some checkpoints into this folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

from examples.tiny_rl.record import RECORDED, RECORDED_OF_SGLANG
from examples.tiny_rl.train import main as train

HEALTHY = Path(__file__).parent / "healthy"
COLLAPSED = Path(__file__).parent / "collapsed"
RECORDS = {"vllm": (HEALTHY, COLLAPSED), "sglang": (RECORDED_OF_SGLANG,)}

_BOTH = [
    *("--start-from", str(RECORDED / "checkpoints" / "step_0001"), "--temperature", "0.7", "--steps", "110"),
]
OPTIONS = {
    "healthy": [*_BOTH, "--learning-rate", "2e-4", "--key", "healthy", "--name", "Sums, temperature applied"],
    # The trainer forgets the temperature from the first step on; from step 36 on the engine falls behind.
    "collapsed": [
        *_BOTH,
        *("--learning-rate", "5e-4", "--key", "collapsed", "--name", "Sums, temperature forgotten"),
        *("--trainer-temperature", "1.0", "--lag-from", "36", "--steps-per-lag", "3"),
        *("--greatest-lag", "24"),
    ],
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in OPTIONS:
        sys.exit(f"usage: python -m examples.demo.records {{{','.join(OPTIONS)}}} --output FOLDER")
    sys.argv[1:2] = OPTIONS[sys.argv[1]]
    train()
