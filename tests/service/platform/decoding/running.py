"""The decoders that run."""

import psutil


def running_decoders() -> set[psutil.Process]:
    """Return the decoders of this process that have not ended."""
    return {child for child in psutil.Process().children() if _is_decoder(child)}


def _is_decoder(child: psutil.Process) -> bool:
    try:
        return "spawn_main" in " ".join(child.cmdline())
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return False
