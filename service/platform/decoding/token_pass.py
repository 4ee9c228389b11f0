"""Choice of the pass over the tokens in a decoder process: compiled, else numpy's, which gives the same numbers.

Compiling takes a while. Numba keeps the machine code on disk, and one process at a time compiles. At the first start of
a release decoders use numpy's pass until another process has compiled; a marker beside the machine code says that they
can load it, in about a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from foreshock.installing import install_command
from foreshock.measures.passes import compiled
from foreshock.measures.passes.compiling import one_at_a_time, package_folder

if TYPE_CHECKING:
    from foreshock_service.platform.settings import Settings

COMPILED = "compiled"
FOR_NOW = "numpy for now: the first start of a release compiles the pass over tokens, which takes about a minute"
_SLOWER = "numpy, several times slower"

_found = f"{_SLOWER}: nothing was prepared"


@dataclass(frozen=True, slots=True)
class TokenPassChoice:
    """The choice to compile, and the folder of compiled code (None: numba's default, beside the package).

    `for_now`: numpy's pass until another process has compiled.
    """

    compile: bool
    folder: Path | None
    for_now: bool = False

    @property
    def code_folder(self) -> Path:
        """The folder of the machine code, and of its marker and lock."""
        return self.folder or package_folder() / "__pycache__"


def chosen_token_pass(settings: Settings) -> TokenPassChoice:
    """Return the choice of the settings; the default folder is beside the package, else beside the token store."""
    # Only here: decoders do not need it, nor the settings.
    from foreshock_service.platform.store.opening import local_folder

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
    if choice.for_now:
        _found = FOR_NOW
        return
    if not choice.compile:
        _found = "numpy, as set by FORESHOCK_TOKEN_PASS"
        return
    if not compiled.available():
        _found = f"{_SLOWER}: numba is not installed ({install_command('fast')})"
        return
    try:
        if choice.folder is not None:
            # Machine code from this folder is executed, so no other user may write it.
            choice.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.environ["NUMBA_CACHE_DIR"] = str(choice.folder)
        with one_at_a_time(choice.code_folder):
            compiled.prepare()
            with contextlib.suppress(OSError):
                _marker(choice).touch()
        _found = COMPILED
    except Exception as error:
        # Such as a numba that does not support this numpy; numpy's pass is slower and still correct.
        _found = f"{_SLOWER}: {type(error).__name__}: {error}"


def first_choice(choice: TokenPassChoice) -> TokenPassChoice:
    """Return what decoders start with: the choice itself, or numpy's pass for now if they would have to compile."""
    must_compile = choice.compile and compiled.available() and not _marker(choice).exists()
    return replace(choice, for_now=must_compile)


def _marker(choice: TokenPassChoice) -> Path:
    """Return the file that is there once this release's pass was compiled with these libraries on such a machine."""
    parts = [sys.version, platform.machine()]
    parts += [f"{name} {version(name)}" for name in ("numba", "numpy")]
    # As numba: machine code is of the sources as they are.
    for source in sorted(package_folder().glob("*.py")):
        found = source.stat()
        parts.append(f"{source.name} {found.st_size} {found.st_mtime_ns}")
    return choice.code_folder / f"compiled-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:16]}"


def token_pass() -> str:
    """Return the pass that this process uses: COMPILED, or numpy's and the reason."""
    return _found
