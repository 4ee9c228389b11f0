"""Asynchronous policy-gradient training on the CPU: a sampler thread that is a few versions of the weights behind.

    foreshock serve                                 # in another terminal
    python -m examples.async_rl.train --steps 30

The sampler generates without waiting for the trainer and loads newer weights whenever there are some, also in the
middle of a response, as engines with in-flight updates do. Each token is logged with the version that sampled it, so
that Foreshock knows the lag of every token.
"""

from __future__ import annotations

import argparse
import copy
import queue
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

import foreshock
from foreshock.rollouts import BatchAttributes

VOCABULARY, END, LENGTH_CAP = 12, 0, 16
ROLLOUTS, PER_PROMPT = 64, 8
LOADED_EVERY = 4  # tokens between two looks for newer weights


class Policy(torch.nn.Module):
    """A recurrent network over the previous token; the prompt is the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 32)
        self.cell = torch.nn.GRU(32, 32, batch_first=True)
        self.head = torch.nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs [N, L, V] of the next token at each position, and the state after the last."""
        hidden, state = self.cell(self.embedding(tokens), state)
        return torch.log_softmax(self.head(hidden), dim=-1), state


@dataclass
class Rollouts:
    """N responses of at most LENGTH_CAP tokens, padded: ids, log μ and the version that sampled each token, [N, L]."""

    prompts: NDArray[np.int64]
    tokens: NDArray[np.int64]
    log_probs: NDArray[np.float32]
    versions: NDArray[np.int32]
    lengths: NDArray[np.int64]


@dataclass
class Weights:
    """The newest weights of the trainer and their version, which the sampler copies."""

    state: dict[str, torch.Tensor]
    version: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def publish(self, policy: Policy, version: int) -> None:
        """Replace the weights."""
        state = copy.deepcopy(policy.state_dict())
        with self.lock:
            self.state, self.version = state, version

    def load(self, policy: Policy) -> int:
        """Copy the weights into `policy`; return their version."""
        with self.lock:
            policy.load_state_dict(self.state)
            return self.version


def sample(weights: Weights, policy: Policy, generator: torch.Generator) -> Rollouts:
    """Return ROLLOUTS responses; newer weights are loaded every LOADED_EVERY tokens."""
    prompts = torch.randint(1, VOCABULARY, (ROLLOUTS // PER_PROMPT,), generator=generator).repeat_interleave(PER_PROMPT)
    tokens, log_probs, versions = [], [], []
    last, state = prompts[:, None], None
    with torch.no_grad():
        for position in range(LENGTH_CAP):
            if position % LOADED_EVERY == 0:
                version = weights.load(policy)
            of_next, state = policy(last, state)
            last = torch.multinomial(of_next[:, -1].exp(), 1, generator=generator)
            tokens.append(last[:, 0])
            log_probs.append(of_next[:, -1].gather(1, last)[:, 0])
            versions.append(torch.full((ROLLOUTS,), version))
            # Time in which the trainer goes on.
            time.sleep(0.001)
    ids = torch.stack(tokens, dim=1).numpy()
    ended = ids == END
    lengths = np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, LENGTH_CAP)
    return Rollouts(
        prompts.numpy(),
        ids,
        torch.stack(log_probs, dim=1).numpy().astype(np.float32),
        torch.stack(versions, dim=1).numpy().astype(np.int32),
        lengths,
    )


def keep_sampling(weights: Weights, ready: queue.Queue[Rollouts], ended: threading.Event) -> None:
    """Sample until `ended`; a full queue makes the rollouts wait, which is what makes them stale."""
    policy, generator = Policy(), torch.Generator().manual_seed(1)
    while not ended.is_set():
        rollouts = sample(weights, policy, generator)
        while not ended.is_set():
            try:
                ready.put(rollouts, timeout=0.1)
                break
            except queue.Full:
                continue


def recompute(policy: Policy, rollouts: Rollouts) -> torch.Tensor:
    """Return log π of the sampled tokens under the trainer's weights, [N, L]."""
    before = np.concatenate([rollouts.prompts[:, None], rollouts.tokens[:, :-1]], axis=1)
    of_next, _ = policy(torch.from_numpy(before))
    of_sampled: torch.Tensor = of_next.gather(2, torch.from_numpy(rollouts.tokens)[:, :, None])
    return of_sampled[:, :, 0]


def train(client: foreshock.Client, steps: int) -> None:
    """Train for some steps, and log each with the versions of its tokens."""
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    weights = Weights(copy.deepcopy(policy.state_dict()))
    ready: queue.Queue[Rollouts] = queue.Queue(maxsize=2)
    ended = threading.Event()
    sampler = threading.Thread(target=keep_sampling, args=(weights, ready, ended), daemon=True)
    sampler.start()
    try:
        waiting = ready.get(timeout=60)
        for step in range(steps):
            # One batch always waits for its turn, so that on any machine the rollouts are a version or more behind.
            rollouts, waiting = waiting, ready.get(timeout=60)
            mask = np.arange(LENGTH_CAP) < rollouts.lengths[:, None]
            reward = (rollouts.tokens == rollouts.prompts[:, None]).mean(axis=1, where=mask)
            advantage = reward - reward.reshape(-1, PER_PROMPT).mean(axis=1).repeat(PER_PROMPT)
            log_probs = recompute(policy, rollouts)
            # The weights that computed `trainer_log_probs`: version `step`, before this step's update.
            log_step(client, step, rollouts, log_probs.detach().numpy(), mask, reward, advantage)
            ratio = torch.exp(log_probs.detach() - torch.from_numpy(rollouts.log_probs)).clamp(max=2.0)
            weighted = ratio * log_probs * torch.from_numpy(advantage.astype(np.float32))[:, None]
            loss = -(weighted * torch.from_numpy(mask)).sum() / int(mask.sum())
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            weights.publish(policy, step + 1)
            client.log_scalars(step, {"loss": loss.item(), "reward": float(reward.mean())})
    finally:
        ended.set()
        sampler.join(10)


def log_step(
    client: foreshock.Client,
    step: int,
    rollouts: Rollouts,
    trainer_log_probs: NDArray[np.float32],
    mask: NDArray[np.bool_],
    reward: NDArray[np.float64],
    advantage: NDArray[np.float64],
) -> None:
    """Log one step: the versions are a column of tokens, the trainer's version an attribute of the batch."""
    client.log_rollouts(
        step,
        {
            "sample_ids": [f"{step}-{row}" for row in range(ROLLOUTS)],
            "group_ids": [f"{step}-{row // PER_PROMPT}" for row in range(ROLLOUTS)],
            "prompt_token_ids": rollouts.prompts,
            "prompt_lengths": np.ones(ROLLOUTS, np.int64),
            "response_token_ids": rollouts.tokens[mask],
            "response_lengths": rollouts.lengths,
            "rollout_log_probs": rollouts.log_probs[mask],
            "trainer_log_probs": trainer_log_probs[mask],
            "weights_version": rollouts.versions[mask],
            "reward": reward,
            "advantage": advantage,
        },
        attributes=BatchAttributes(
            trainer_weights_version=step,
            trainer_policy="recomputed_old",
            logprobs_mode="processed_logprobs",
            temperature=1.0,
            length_cap=LENGTH_CAP,
        ),
    )


def main() -> None:
    """Train and log to the service of FORESHOCK_URL."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--run-key", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with foreshock.Client(run_key=options.run_key) as client:
        client.start_run(name="asynchronous", model="GRU", trainer="asynchronous example", initial_learning_rate=3e-3)
        train(client, options.steps)
        status = client.flush(60)
        print(f"delivered: {bool(status)}; run {client.run_id}")


if __name__ == "__main__":
    main()
