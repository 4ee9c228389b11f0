"""The inference engine as a server: SGLang on this CPU, set up by `scripts/setup_sglang.sh`, asked over HTTP."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from examples.tiny_rl.sampler import Response
from examples.tiny_rl.task import END_OF_SEQUENCE, MAX_RESPONSE_TOKENS

SGLANG = Path(os.environ.get("FORESHOCK_SGLANG") or Path(sys.prefix) / "sglang")
IN_BFLOAT16 = ("--dtype", "bfloat16", "--disable-radix-cache")
"""How the server that samples and the one of its replay are started: what is computed of a cached prompt depends on
others."""


class SglangError(RuntimeError):
    """SGLang is not installed, or its server did not start."""


@contextmanager
def running_sglang(folder: Path, log: Path, *arguments: str, path: str = str(SGLANG)) -> Iterator[httpx.Client]:
    """Yield a connection to an SGLang server on the checkpoint of `folder`, in float32; its output goes to `log`.

    `arguments` are added to its command line. Raises SglangError.
    """
    if not (SGLANG / "sglang").exists():
        raise SglangError(f"SGLang is not in {SGLANG}; run scripts/setup_sglang.sh")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), "--dtype", "float32",
        "--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph", "--disable-overlap-schedule",
        "--skip-tokenizer-init", "--mem-fraction-static", "0.5", "--max-total-tokens", "8192", "--host", "127.0.0.1",
        "--port", str(port), "--enable-custom-logit-processor", "--sleep-on-idle", *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as http:
            deadline = time.monotonic() + 600
            while "The server is fired up" not in log.read_text(errors="replace"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SglangError(f"SGLang did not start:\n{log.read_text(errors='replace')[-3000:]}")
                time.sleep(0.5)
            yield http
    finally:
        # Its processes are a group of their own.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class SglangSampler:
    """An SGLang server, with the methods of `Sampler`: at temperature 1 the logged μ is the sampling distribution."""

    engine = "sglang"

    def __init__(self, server: httpx.Client) -> None:
        self._server = server
        self.version = str(server.get("/server_info").raise_for_status().json()["version"])

    def sample(
        self, prompts: Sequence[Sequence[int]], responses_per_prompt: int, max_tokens: int = MAX_RESPONSE_TOKENS
    ) -> list[list[Response]]:
        """Return `responses_per_prompt` independent responses of at most `max_tokens` tokens to each prompt."""
        answers = self._generate(
            [list(prompt) for prompt in prompts for _ in range(responses_per_prompt)],
            {"max_new_tokens": max_tokens, "temperature": 1.0, "stop_token_ids": [END_OF_SEQUENCE]},
        )
        responses = [
            Response(
                token_ids=answer["output_ids"],
                log_probs=[entry[0] for entry in answer["meta_info"]["output_token_logprobs"]],
                finish_reason=answer["meta_info"]["finish_reason"]["type"],
            )
            for answer in answers
        ]
        return [
            responses[start : start + responses_per_prompt] for start in range(0, len(responses), responses_per_prompt)
        ]

    def score(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> list[float]:
        """Return log-probabilities of given responses by prefill, flat in the order of the responses."""
        sequences = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
        answers = self._generate(sequences, {"max_new_tokens": 1, "temperature": 0.0}, logprob_start_len=0)
        return [
            entry[0]
            for answer, response in zip(answers, responses, strict=True)
            for entry in answer["meta_info"]["input_token_logprobs"][-len(response) :]
        ]

    def reload(self, folder: Path) -> None:
        """Load the weights of a checkpoint folder. `reload_check` verifies that they arrived."""
        self._server.post("/update_weights_from_disk", json={"model_path": str(folder)}).raise_for_status()

    def _generate(self, sequences: list[list[int]], parameters: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
        body = {"input_ids": sequences, "sampling_params": parameters, "return_logprob": True, **fields}
        found: list[dict[str, Any]] = self._server.post("/generate", json=body).raise_for_status().json()
        return found
