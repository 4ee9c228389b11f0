"""A service that dies by SIGKILL in the middle of an upload. Run by test_crash.py in a process of its own.

    python -m tests.service.runs.ingest.crashing_service PORT FUNCTION

FUNCTION is the call at which it dies: `commit_shard` (the token file is in place, its row is not) or `close_step`
(the shard is committed and its step is not closed).
"""

import os
import signal
import sys
from typing import Any

import uvicorn

from foreshock_service.app import create_app
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import load_settings
from foreshock_service.runs import ingest, shards
from foreshock_service.runs.shard_decoding import PRELOAD


def die(*_: Any) -> None:
    """End this process as a power cut does."""
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    settings = load_settings()
    port, function = sys.argv[1:]
    assert function in ("commit_shard", "close_step")
    setattr(ingest if function == "commit_shard" else shards, function, die)
    uvicorn.run(create_app(settings, DecoderPool(settings, PRELOAD)), port=int(port), log_level="warning")
