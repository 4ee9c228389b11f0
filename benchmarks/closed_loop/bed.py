"""A small reinforcement-learning problem with lag and noise: many runs at once, about a second of one core each.

A response is the running sum modulo 10 of four digits that repeat; it is rewarded if all its tokens are right. The
policy is an MLP of 20,000 parameters on the last token, the next digit and the position. In a setting that `grows` it
may end a response, which is rewarded for each right token before the end. A step samples 8 responses to each of 8
prompts with the weights of `lag` steps ago, takes leave-one-out advantages, and makes one update.

The runs of a batch differ in what a controller does with them. Those of one seed have the same prompts and the same
random numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, Protocol

import torch
from torch import Tensor

Correction = Literal["token_tis", "sequence_mis"]
Optimizer = Literal["adamw", "sgd"]

DIGITS: Final = 10
BEGIN: Final = 10
TOKENS: Final = 16
"""Ten digits, the beginning, and tokens that are never right."""
END: Final = TOKENS - 1
ENDS_FROM, ENDS = 3, 0.15
"""The place from which the first policy of a setting that `grows` may end a response, and how often it does."""
PERIOD: Final = 4
WIDTH: Final = 64
PROMPTS, RESPONSES = 8, 8
RATIO_CAP: Final = 2.0
LARGEST_GRADIENT: Final = 1.0
KEPT_EVERY: Final = 10
"""Steps between checkpoints; the first one is before step 1."""
SCORED_AGAIN: Final = 16
"""Rollouts whose log-probs after the update give `update_k3`, as hooks measure it."""
WARM_SEED: Final = 0
START_TOKEN: Final = 0.75
"""Mean probability of a right token of the first policy of a setting that `grows`."""
START_REWARD: Final = 0.4
"""Expected reward of the policy before RL, from its mean log-prob of the right tokens."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A problem: ``lag`` in steps, or between the two steps of ``shift`` only; ``noise`` of the sampler's weights, in
    standard deviations of each matrix."""

    name: str
    lag: int
    rate: float
    noise: float = 0.0
    optimizer: Optimizer = "adamw"
    length: int = 12
    shift: tuple[int, int] | None = None
    stale: float = 1.0
    """Fraction of the prompts that the old weights sample; the newest ones sample the others."""
    steps: int = 150
    grows: bool = False
    is_harm: bool = False
    """Whether the constant rate learns well: there nothing may be lost."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a step measured in one run."""

    step: int
    reward: float
    k3: float
    entropy: float
    gradient_norm: float
    update_k3: float
    lag: float
    k3_at_lag_0: float | None
    tokens: int
    tokens_at_lag_0: int
    ess: float
    """Effective sample of the sequences, as a fraction."""


class Controller(Protocol):
    """The rate and the correction of a run; `goes_back_to` is the step whose first weights it wants back."""

    @property
    def correction(self) -> Correction | None: ...

    @property
    def goes_back_to(self) -> int | None: ...

    def scale(self, step: int) -> float: ...

    def observe(self, measured: Measured) -> None: ...


@dataclass(frozen=True, slots=True)
class Layers:
    """The parameters of a batch of policies as the tables and matrices that a forward pass multiplies."""

    table: Tensor
    places: Tensor
    second: Tensor
    second_bias: Tensor
    last: Tensor
    last_bias: Tensor

    @classmethod
    def of(cls, parameters: Tensor, length: int) -> Layers:
        """Split parameters [B, P]."""
        parts = torch.split(parameters, [math.prod(shape) for shape in shapes(length).values()], 1)
        by_name = {
            name: part.view(-1, *shape) for part, (name, shape) in zip(parts, shapes(length).items(), strict=True)
        }
        # The first layer acts on three embeddings: it is applied to their tables, which have few rows.
        of_token, of_digit, of_position = torch.split(by_name["first"], WIDTH, 1)
        table = torch.cat([by_name["token"] @ of_token, by_name["digit"] @ of_digit], 1)
        places = by_name["position"] @ of_position + by_name["first_bias"]
        return cls(table, places, *(by_name[name] for name in ("second", "second_bias", "last", "last_bias")))

    def log_probs(self, previous: Tensor, digits: Tensor, places: Tensor) -> Tensor:
        """Return the log-probs [B, N, T, V] of the next token after tokens [B, N, T]; ``places`` are [B, T, W]."""
        ids = torch.stack([previous, TOKENS + digits], -1)
        chosen = torch.zeros(*previous.shape, TOKENS + DIGITS).scatter_(-1, ids, 1.0)
        batch, number, length = previous.shape
        hidden = (chosen.view(batch, number * length, -1) @ self.table).view(batch, number, length, WIDTH)
        hidden = torch.nn.functional.gelu(hidden + places[:, None]).view(batch, -1, WIDTH)
        hidden = torch.nn.functional.gelu(torch.baddbmm(self.second_bias, hidden, self.second))
        return torch.baddbmm(self.last_bias, hidden, self.last).log_softmax(-1).view(batch, number, length, TOKENS)

    def of_responses(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """Return the log-probs [B, N, T, V] of all tokens along responses [B, N, T] to prompts [B, N, 4]."""
        begin = torch.full((*responses.shape[:2], 1), BEGIN)
        previous = torch.cat([begin, responses[..., :-1]], -1)
        digits = prompts[..., torch.arange(responses.shape[-1]) % PERIOD]
        return self.log_probs(previous, digits, self.places)


@cache
def shapes(length: int) -> Mapping[str, tuple[int, int]]:
    """Return the shapes of a policy's parameters for responses of ``length`` tokens."""
    found = {"token": (TOKENS, WIDTH), "digit": (DIGITS, WIDTH), "position": (length, WIDTH)}
    for name, rows, columns in (("first", 3 * WIDTH, WIDTH), ("second", WIDTH, WIDTH), ("last", WIDTH, TOKENS)):
        found |= {name: (rows, columns), f"{name}_bias": (1, columns)}
    return found


def of_tokens(log_probs: Tensor, responses: Tensor) -> Tensor:
    """Return the log-probs [B, N, T] of the responses' tokens."""
    return log_probs.gather(-1, responses[..., None])[..., 0]


@cache
def started(length: int, grows: bool = False) -> Tensor:
    """Return the parameters [1, P] of the policy before RL, trained on right responses, or parts of them."""
    random = torch.Generator().manual_seed(WARM_SEED)
    drawn = []
    for name, shape in shapes(length).items():
        if name in ("token", "digit", "position"):
            drawn.append(torch.randn(shape, generator=random))
        else:
            rows = shapes(length)[name.removesuffix("_bias")][0]
            drawn.append((torch.rand(shape, generator=random) * 2.0 - 1.0) / math.sqrt(rows))
    parameters = torch.cat([each.flatten() for each in drawn])[None].requires_grad_()
    optimizer = torch.optim.Adam([parameters], 1e-3)
    for step in range(6000):
        prompts = torch.randint(0, DIGITS, (3072 // length, PERIOD), generator=random)
        right = targets(prompts, length)[None]
        if grows:
            ends = torch.rand(right.shape, generator=random) < ENDS
            right = torch.where(ends & (torch.arange(length) >= ENDS_FROM), END, right)
        chosen = of_tokens(Layers.of(parameters, length).of_responses(prompts[None], right), right)
        mask = before_end(right) if grows else torch.ones_like(chosen)
        if step % 10 == 0:
            found = chosen.detach()
            whole, each = found.sum(-1).exp().mean(), found[(mask > 0.0) & (right != END)].exp().mean()
            if float(each) > START_TOKEN if grows else float(whole) > START_REWARD:
                break
        optimizer.zero_grad()
        (-(chosen * mask).sum() / mask.sum()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return parameters.detach()


def targets(prompts: Tensor, length: int) -> Tensor:
    """Return the right responses [N, T] to prompts of four digits [N, 4]."""
    repeated = prompts[..., torch.arange(length) % PERIOD]
    return repeated.cumsum(-1) % DIGITS


def before_end(responses: Tensor) -> Tensor:
    """Return 1 for the tokens [..., T] up to the first `END` and it, 0 after."""
    ends = responses == END
    return (ends.cumsum(-1) - ends.long() == 0).float()


@torch.no_grad()
def sample(parameters: Tensor, prompts: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return responses [B, N, T] and the log-probs of their tokens, by the uniform numbers [B, N, T]."""
    batch, number, length = uniform.shape
    layers = Layers.of(parameters, length)
    previous = torch.full((batch, number, 1), BEGIN)
    tokens, log_probs = [], []
    for place in range(length):
        digit = prompts[..., place % PERIOD, None]
        log_prob = layers.log_probs(previous, digit, layers.places[:, place : place + 1])
        cumulative = log_prob.exp().cumsum(-1)
        below = cumulative < uniform[..., place, None, None] * cumulative[..., -1:]
        previous = below.sum(-1).clamp(max=TOKENS - 1)
        tokens.append(previous)
        log_probs.append(of_tokens(log_prob, previous))
    return torch.cat(tokens, -1), torch.cat(log_probs, -1)


def k3_of(d: Tensor, mask: Tensor) -> Tensor:
    """Return the mean k3 of each run, from d = log π − log μ [B, …] of its tokens, over those whose mask is 1."""
    wide = (d * mask).double().flatten(1)
    return (torch.expm1(wide) - wide).sum(1) / mask.flatten(1).sum(1)


def weights_of(correction: Correction | None, d: Tensor) -> Tensor:
    """Return the weights [N, T] of a run's tokens."""
    if correction is None:
        return torch.ones_like(d)
    if correction == "token_tis":
        return d.exp().clamp(max=RATIO_CAP)
    ratio = d.sum(-1, keepdim=True).exp()
    return torch.where(ratio <= RATIO_CAP, ratio, 0.0).expand_as(d)


class _Optimizer:
    """AdamW without decay, or SGD with momentum, for a batch of runs with a rate each."""

    def __init__(self, kind: Optimizer, parameters: Tensor) -> None:
        self._kind, self._steps = kind, torch.zeros(len(parameters), 1)
        self._first, self._second = torch.zeros_like(parameters), torch.zeros_like(parameters)

    def forget(self, run: int) -> None:
        """Start again in a run."""
        for each in (self._steps, self._first, self._second):
            each[run] = 0.0

    def updated(self, parameters: Tensor, gradients: Tensor, rates: Tensor) -> Tensor:
        self._steps += 1
        if self._kind == "sgd":
            self._first.mul_(0.9).add_(gradients)
            return parameters - rates[:, None] * self._first
        self._first.lerp_(gradients, 0.1)
        self._second.mul_(0.95).addcmul_(gradients, gradients, value=0.05)
        size = (self._second / (1.0 - 0.95**self._steps)).sqrt_().add_(1e-8)
        return parameters - self._first.div(size).mul_(rates[:, None] / (1.0 - 0.9**self._steps))


def _restored(at: int, run: int, history: deque[Tensor], kept: Mapping[int, Tensor], optimizer: _Optimizer) -> Tensor:
    """Return the parameters with those of a run as they were before step ``at``, also for its sampler."""
    for place, each in enumerate(history):
        history[place] = each.clone()
        history[place][run] = kept[at][run]
    optimizer.forget(run)
    return history[-1]


class _Randomness:
    """The prompts and random numbers of one seed, the same for all its runs."""

    def __init__(self, seed: int, setting: Setting) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._length = setting.length

    def prompts(self) -> Tensor:
        drawn = torch.randint(0, DIGITS, (PROMPTS, PERIOD), generator=self._generator)
        return drawn.repeat_interleave(RESPONSES, 0)

    def uniform(self) -> Tensor:
        return torch.rand(PROMPTS * RESPONSES, self._length, generator=self._generator)

    def normal(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=self._generator)


def _noisy(parameters: Tensor, setting: Setting, seeds: Sequence[_Randomness], owner: Sequence[int]) -> Tensor:
    """Return the sampler's parameters: matrices and tables with noise, biases without."""
    if setting.noise == 0.0:
        return parameters
    noisy = parameters.clone()
    start = 0
    for rows, columns in shapes(setting.length).values():
        part = noisy[:, start : start + rows * columns]
        start += rows * columns
        if rows > 1:
            drawn = torch.stack([each.normal((rows * columns,)) for each in seeds])[list(owner)]
            part += setting.noise * part.std(1, keepdim=True) * drawn
    return noisy


def run(setting: Setting, controllers: Sequence[tuple[int, Controller]]) -> None:
    """Make the runs of a setting, one for each seed and controller; a controller observes each step of its run."""
    numbers = sorted({seed for seed, _ in controllers})
    seeds = [_Randomness(seed, setting) for seed in numbers]
    owner = [numbers.index(seed) for seed, _ in controllers]
    batch = len(controllers)
    parameters = started(setting.length, setting.grows).expand(batch, -1)
    optimizer = _Optimizer(setting.optimizer, parameters)
    history, kept = deque([parameters], maxlen=setting.lag + 1), dict[int, Tensor]()
    for step in range(1, setting.steps + 1):
        for place, (_, controller) in enumerate(controllers):
            if controller.goes_back_to is not None:
                parameters = _restored(controller.goes_back_to, place, history, kept, optimizer)
        if step % KEPT_EVERY == 1:
            kept[step] = parameters
        is_stale = setting.shift is None or setting.shift[0] <= step <= setting.shift[1]
        old = history[0] if is_stale else history[-1]
        lag = len(history) - 1 if is_stale else 0
        prompts = torch.stack([each.prompts() for each in seeds])[owner]
        uniform = torch.stack([each.uniform() for each in seeds])[owner]
        responses, log_mu = sample(_noisy(old, setting, seeds, owner), prompts, uniform)
        fresh = 0
        if lag and setting.stale < 1.0:
            fresh = round((1.0 - setting.stale) * PROMPTS) * RESPONSES
            newest = _noisy(parameters, setting, seeds, owner)
            responses[:, :fresh], log_mu[:, :fresh] = sample(newest, prompts[:, :fresh], uniform[:, :fresh])
        elif not lag:
            fresh = PROMPTS * RESPONSES
        are_right = responses == targets(prompts, setting.length)
        right = are_right.long().cumprod(-1).float().mean(-1) if setting.grows else are_right.all(-1).float()
        mask = before_end(responses) if setting.grows else torch.ones_like(log_mu)
        groups = right.view(batch, PROMPTS, RESPONSES)
        others = (groups.sum(-1, keepdim=True) - groups) / (RESPONSES - 1)
        advantages = (groups - others).view(batch, -1)
        leaf = parameters.detach().requires_grad_()
        of_all = Layers.of(leaf, setting.length).of_responses(prompts, responses)
        log_pi = of_tokens(of_all, responses)
        d = (log_pi.detach() - log_mu) * mask
        weights = torch.stack(
            [weights_of(each.correction, of_run) for (_, each), of_run in zip(controllers, d, strict=True)]
        )
        loss = -(advantages * (weights * mask * log_pi).sum(-1)).mean(-1).sum()
        (gradients,) = torch.autograd.grad(loss, leaf)
        norm = gradients.norm(dim=1)
        gradients = gradients * (LARGEST_GRADIENT / (norm + 1e-6)).clamp(max=1.0)[:, None]
        rates = torch.tensor([setting.rate * each.scale(step) for _, each in controllers])
        with torch.no_grad():
            parameters = optimizer.updated(parameters, gradients, rates)
            few = slice(0, PROMPTS * RESPONSES, PROMPTS * RESPONSES // SCORED_AGAIN)
            after = Layers.of(parameters, setting.length).of_responses(prompts[:, few], responses[:, few])
            update = k3_of(of_tokens(after, responses[:, few]) - log_pi.detach()[:, few], mask[:, few])
            entropy = (-(of_all.exp() * of_all).sum(-1) * mask).sum((1, 2)) / mask.sum((1, 2))
            ratio = d.double().sum(-1).exp()
            ess = ratio.sum(-1).square() / (ratio.square().sum(-1) * ratio.shape[-1])
            k3, at_lag_0 = k3_of(d, mask), k3_of(d[:, :fresh], mask[:, :fresh]) if fresh else None
            tokens, newest_tokens = mask.sum((1, 2)).int().tolist(), mask[:, :fresh].sum((1, 2)).int().tolist()
        history.append(parameters)
        mean_lag = lag * (1.0 - fresh / (PROMPTS * RESPONSES))
        for place, (_, controller) in enumerate(controllers):
            controller.observe(
                Measured(
                    step=step,
                    reward=float(right[place].mean()),
                    k3=float(k3[place]),
                    entropy=float(entropy[place].detach()),
                    gradient_norm=float(norm[place]),
                    update_k3=float(update[place]),
                    lag=mean_lag,
                    k3_at_lag_0=None if at_lag_0 is None else float(at_lag_0[place]),
                    tokens=tokens[place],
                    tokens_at_lag_0=newest_tokens[place],
                    ess=float(ess[place]),
                )
            )
