"""Run by test_crash.py in a process of its own: dies by SIGKILL once a shard's file is in place and its row is not."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import uvicorn

from service.app import create_app
from service.platform.decoding.pool import DecoderPool
from service.platform.settings import load_settings
from service.runs.ingest import service
from service.runs.rollouts.shards import PRELOAD


def die(*_: Any) -> None:
    """What a power cut does."""
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    settings = load_settings()
    service.commit_shard = die  # type: ignore[assignment]
    uvicorn.run(create_app(settings, DecoderPool(settings, PRELOAD)), port=int(sys.argv[1]), log_level="warning")
