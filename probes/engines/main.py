"""The engine's side: `python -m foreshock_probes.engines.main <engine> --requests <fd> --replies <fd>`.

Not a `__main__.py`: Python does not import a module of that name in processes that multiprocessing spawns.
"""

from __future__ import annotations

import argparse
import os
import sys

from foreshock.scorers import ENGINES
from foreshock_probes.engines.environment import hold_this_process
from foreshock_probes.engines.forking import serve_with_children
from foreshock_probes.engines.protocol import Ready
from foreshock_probes.engines.serving import send, serve

# At import and not in main(): processes that an engine spawns import this module too and must be held as well.
hold_this_process()


def main() -> int:
    """Serve commands until the pipe of the requests is closed."""
    parser = argparse.ArgumentParser(prog="python -m foreshock_probes.engines.main")
    parser.add_argument("engine", choices=list(ENGINES))
    parser.add_argument("--requests", type=int, required=True, help="file descriptor to read commands from")
    parser.add_argument("--replies", type=int, required=True, help="file descriptor to write replies to")
    arguments = parser.parse_args()
    for descriptor in (arguments.requests, arguments.replies):
        os.set_inheritable(descriptor, False)  # the engine's own children must not keep the pipes open
    send(arguments.replies, Ready(pid=os.getpid()))
    if ENGINES[arguments.engine].forks:
        return serve_with_children(arguments.engine, arguments.requests, arguments.replies)
    serve(arguments.engine, arguments.requests, arguments.replies)
    return 0


if __name__ == "__main__":
    sys.exit(main())
