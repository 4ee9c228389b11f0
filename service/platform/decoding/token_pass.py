"""Choice of the pass over the tokens in a decoder process: compiled, else numpy's, which gives the same numbers.

Compiling takes about half a minute. Numba keeps the machine code on disk, and one process at a time compiles, so that
only the first start of a release takes that long; a later one loads it in about a second.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foreshock.measures.passes import compiled
from foreshock.measures.passes.compiling import one_at_a_time, package_folder

if TYPE_CHECKING:
    from service.platform.settings import Settings

COMPILED = "compiled"
_SLOWER = "numpy, several times slower"

_found = f"{_SLOWER}: nothing was prepared"


@dataclass(frozen=True, slots=True)
class TokenPassChoice:
    """The choice to compile, and the folder of compiled code (None: numba's default, beside the package)."""

    compile: bool
    folder: Path | None


def chosen_token_pass(settings: Settings) -> TokenPassChoice:
    """Return the choice of the settings; the default folder is beside the package, else beside the token store."""
    # Only here: decoders do not need it, nor the settings.
    from service.platform.store.opening import local_folder

    folder = None
    if settings.compiled_folder:
        folder = Path(settings.compiled_folder).absolute()
    elif not os.access(package_folder(), os.W_OK):
        folder = local_folder(settings).parent / "compiled"
    return TokenPassChoice(settings.token_pass == COMPILED, folder)


def prepare_token_pass(choice: TokenPassChoice) -> None:
    """Compile the pass or load the compiled one; if that fails numpy's is used, and `token_pass` gives the reason.

    Must come before anything else imports numba.
    """
    global _found
    if not choice.compile:
        _found = "numpy, as set by FORESHOCK_TOKEN_PASS"
        return
    if not compiled.available():
        _found = f"{_SLOWER}: numba is not installed (pip install 'foreshock[fast]')"
        return
    try:
        if choice.folder is not None:
            # Machine code from this folder is executed, so no other user may write it.
            choice.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.environ["NUMBA_CACHE_DIR"] = str(choice.folder)
        with one_at_a_time(choice.folder or package_folder() / "__pycache__"):
            # There are as many decoders as processors, so each uses one thread.
            compiled.prepare(threads=1)
        _found = COMPILED
    except Exception as error:
        # Such as a numba that does not support this numpy; numpy's pass is slower and still correct.
        _found = f"{_SLOWER}: {type(error).__name__}: {error}"


def token_pass() -> str:
    """Return the pass that this process uses: COMPILED, or numpy's and the reason."""
    return _found
