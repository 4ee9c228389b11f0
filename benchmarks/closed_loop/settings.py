"""The settings of the cheap test bed."""

from typing import Final

from benchmarks.closed_loop.bed import Setting

SETTINGS: Final = (
    Setting("lag2", lag=2, rate=4e-3),
    Setting("lag4", lag=4, rate=1e-3),
    Setting("lag8", lag=8, rate=1e-3),
    Setting("lag16-slow", lag=16, rate=3e-4),
    Setting("lag16", lag=16, rate=1e-3),
    Setting("lag4-fast", lag=4, rate=3e-3),
    Setting("lag8-fast", lag=8, rate=3e-3),
    Setting("fast", lag=0, rate=6e-3),
    Setting("numerics-lag4", lag=4, rate=3e-3, noise=0.03),
    Setting("partial", lag=16, rate=1e-3, stale=0.5),
    Setting("shift", lag=16, rate=1e-3, shift=(60, 100)),
    Setting("sgd-lag8", lag=8, rate=0.05, optimizer="sgd"),
    Setting("long-lag8", lag=8, rate=1e-3, length=128, steps=75),
    Setting("longer-lag8", lag=8, rate=1e-3, length=256, steps=75),
    Setting("surge", lag=4, rate=1e-3, length=32, grows=True),
    Setting("numerics", lag=0, rate=1e-3, noise=0.05, is_harm=True),
    Setting("benign-lag", lag=2, rate=5e-4, is_harm=True),
    Setting("healthy", lag=0, rate=1e-3, is_harm=True),
)
