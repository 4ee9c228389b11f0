"""Let the released code of a framework run with its trainer connected, and print what arrives as JSON.

    python -m tests.foreshock.integrations.connected_runs FRAMEWORK FOLDER…

Each FOLDER has a release's files. What the framework imports and is not installed is replaced by empty modules: the
trainer's own functions run, models and engines do not.
"""

import asyncio
import importlib.abc
import importlib.machinery
import inspect
import json
import logging.config
import sys
import types
import typing
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from foreshock.integrations import connect as connecting
from foreshock.integrations import trainer_run
from foreshock.learning_rate.levers import Correction

PROMPT, LENGTHS = 2, (3, 5)
SAMPLED = [[1, 0, 1], [1, 1, 1, 1, 1]]
MU = [[-0.5, 0.0, -1.5], [-0.25, -2.0, -0.125, -1.0, -0.75]]
PI = [[-0.625, 0.0, -1.25], [-0.25, -2.5, -0.25, -1.0, -0.5]]
RESPONSES = [[5, 6, 7], [8, 9, 10, 11, 12]]
RATE, SCALE = 1e-5, 0.5


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes empty modules of what the release imports and no other finder has."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders, self._made = tuple(folders), set[str]()

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        frame: Any = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        top = name.partition(".")[0]
        if not frame.f_code.co_filename.startswith(self._folders) and top not in self._made:
            return None
        self._made.add(top)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Client:
    """Keeps what is logged."""

    def __init__(self, **_: Any) -> None:
        self.told: dict[str, Any] = {"rollouts": [], "metrics": [], "acknowledged": []}
        Client.newest = self

    newest: Any = None

    def tell_remarks_of(self, _log: Any) -> None:
        """Keep no remarks: the service would show them."""

    def start_run(self, **described: Any) -> None:
        names = ("model", "initial_learning_rate", "length_cap", "resume_step", "shard", "shards")
        self.told["described"] = {name: described.get(name) for name in names}

    def log_rollouts(self, step: int, columns: dict[str, Any], *, attributes: Any) -> None:
        self.told["rollouts"].append([step, json.loads(attributes.to_json()), rows_of(columns)])

    def log_scalars(self, step: int, numbers: dict[str, float]) -> None:
        self.told["metrics"].append([step, numbers])

    def finish(self) -> None:
        self.told["finished"] = True


def rows_of(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of the batch that the client would send."""
    from foreshock.client.capture import capture_rollouts

    batch = capture_rollouts(columns, default_ids="row", attributes=None)()
    names = [name for name in columns if "padding" not in name and name != "group_id"]
    found: dict[str, Any] = {"group_id": batch.group_ids}
    for name in names:
        values, offsets = getattr(batch, name), (batch.prompt_offsets if "prompt" in name else batch.response_offsets)
        per_token = len(values) == offsets[-1]
        found[name] = [row.tolist() for row in np.split(values, offsets[1:-1])] if per_token else values.tolist()
    return found


class Feed:
    """Advises half the rate, and token TIS at 2."""

    advice = "known"

    def __init__(self, client: Client) -> None:
        self._client = client

    def scale(self, _step: int) -> float:
        return SCALE

    def correction(self, _step: int) -> Correction:
        return Correction("token_tis", "2")

    def report(self, lever: str, step: int, done: Correction | None, refused: str | None) -> None:
        self._client.told["reported"] = [lever, step, done and done.kind, refused]

    def acknowledge(self, step: int, rate: float, scale: float) -> None:
        self._client.told["acknowledged"].append([step, rate, scale])


def padded(rows: Sequence[Sequence[float]], width: int, *, left: int = 0) -> Any:
    """Return rows as a matrix, from place `left` on."""
    import torch

    found = torch.zeros(len(rows), width)
    for number, row in enumerate(rows):
        found[number, left : left + len(row)] = torch.tensor(row, dtype=torch.float32)
    return found


def sequences(width: int) -> tuple[Any, Any]:
    """Return token ids and attention mask, padded on the right."""
    tokens = padded([[1, 2, *row] for row in RESPONSES], width).long()
    return tokens, (tokens > 0).long()


def tinker_cookbook() -> None:
    import tinker
    import torch
    from tinker_cookbook.rl import train

    given: list[float] = []

    async def answer(value: Any) -> Any:
        return value

    def optim_step(_client: Any, params: Any) -> Any:
        given.append(params.learning_rate)
        return answer(SimpleNamespace(metrics={}))

    tinker.TrainingClient.optim_step = optim_step
    connecting.connect(train, run_key="tinker")
    datums = []
    for row, mask in enumerate(SAMPLED):
        tokens = [1, 2, *RESPONSES[row]]
        before = [0.0] * (PROMPT - 1)
        columns = {"target_tokens": torch.tensor(tokens[1:]), "logprobs": torch.tensor(before + MU[row]),
                   "mask": torch.tensor(before + [float(each) for each in mask]),
                   "advantages": torch.tensor(before + [0.5] * len(mask))}  # fmt: skip
        datums.append(tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={name: tinker.TensorData.from_torch(values) for name, values in columns.items()},
        ))  # fmt: skip
    policy = [torch.tensor([0.0] * (PROMPT - 1) + row) for row in PI]
    outputs = [{"logprobs": tinker.TensorData.from_torch(row)} for row in policy]
    client = tinker.TrainingClient.__new__(tinker.TrainingClient)
    client.save_weights_and_get_sampling_client = lambda *_, **__: answer(None)
    client.forward_backward = lambda *_, **__: answer(SimpleNamespace(loss_fn_outputs=outputs))
    checkpoints = SimpleNamespace(should_save_periodic=lambda _step: False)
    reuse = SimpleNamespace(rollout_workers_finished=SimpleNamespace(is_set=lambda: True), sampling_client=None)

    async def prepared(*_: Any, **__: Any) -> Any:
        return datums, {}, train.TokenUsage()

    train.prepare_minibatch = prepared
    config = SimpleNamespace(
        kl_penalty_coef=0, kl_discount_factor=0, learning_rate=RATE, num_substeps=1, loss_fn_config=None,
        compute_post_kl=False, training_loss_fn=lambda: "importance_sampling", records_stability_info=lambda: False,
        model_name="m", max_tokens=8, temperature=1.0, async_config=None,
    )  # fmt: skip

    async def step() -> dict[str, float]:
        # Nothing is left to train: it ends after its preparations.
        await train.do_sync_training(**_of_loop(train, config, client, checkpoints))
        _, metrics = await train.do_train_step_and_get_sampling_client(
            config, 7, client, checkpoints, None, None, [], [], None, sampling_client_reuse=reuse
        )
        train.ml_log.MultiplexLogger([]).log_metrics(metrics, step=7)
        return dict(metrics)

    Client.newest.told |= {"own": asyncio.run(step()), "rate": given[0]}


def _of_loop(train: Any, config: Any, client: Any, checkpoints: Any) -> dict[str, Any]:
    """Return the arguments of the loop of a run that ends with step 8, begun at its end."""
    names = inspect.signature(train.do_sync_training).parameters
    steps = {"start_batch": 9, "end_batch": 9, "num_batches": 9}
    given = {"config": config, "training_client": client, "checkpoint_mgr": checkpoints}
    return {**dict.fromkeys(names), **steps, **given}


def openrlhf() -> None:
    import torch
    from openrlhf.trainer.ppo_trainer import BasePPOTrainer
    from openrlhf.trainer.ppo_utils.experience import Experience

    tokens, attention = sequences(7)
    experience = Experience(
        sequences=tokens, attention_mask=attention, action_mask=padded(SAMPLED, 6, left=1).bool(),
        action_log_probs=padded(PI, 6, left=1), rollout_log_probs=padded(MU, 6, left=1),
        advantages=padded([[0.5] * 3, [0.5] * 5], 6, left=1), rewards=torch.tensor([1.0, 0.0]),
        response_length=torch.tensor([3, 5]), truncated=torch.tensor([False, False]),
        info={"reward": torch.tensor([1.0, 0.0])},
    )  # fmt: skip
    run = connecting.Connection("openrlhf", run_key="openrlhf", model="m", initial_learning_rate=RATE)
    run.log_rollouts(7, [experience])
    run.log_metrics(7, BasePPOTrainer._compute_rollout_stats(None, [experience]))


def skyrl() -> None:
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
    from skyrl.train.config.config import AlgorithmConfig
    from skyrl.train.trainer import RayPPOTrainer

    tokens, attention = sequences(7)
    batch = TrainingInputBatch({
        "sequences": tokens, "attention_mask": attention, "response_mask": padded([[1] * 3, [1] * 5], 5),
        "loss_mask": padded(SAMPLED, 5), "rollout_logprobs": padded(MU, 5), "action_log_probs": padded(PI, 5),
        "advantages": padded([[0.5] * 3, [0.5] * 5], 5),
    })  # fmt: skip
    batch.metadata = {"policy_mini_batch_boundaries": [[0, 2]]}
    rates: list[float] = []
    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    sampling = {"max_generate_length": 8, "temperature": 1.0, "top_p": 0.9, "min_p": 0.0, "top_k": -1}
    defaults = {name: getattr(AlgorithmConfig, name)
                for name in ("policy_loss_type", "loss_reduction", "eps_clip_low", "eps_clip_high")}  # fmt: skip
    policy = SimpleNamespace(model=SimpleNamespace(path="m"), optimizer_config=SimpleNamespace(lr=RATE))
    trainer.cfg = SimpleNamespace(
        trainer=SimpleNamespace(policy=policy, update_epochs_per_batch=1, algorithm=SimpleNamespace(**defaults)),
        generator=SimpleNamespace(sampling_params=SimpleNamespace(**sampling)),
    )
    trainer.global_step, trainer.total_training_steps = 7, 7
    trainer.tracker = SimpleNamespace(log=lambda data, step, commit=False: None)
    trainer.dispatch = SimpleNamespace(
        forward_backward_from_staged=lambda *_: SimpleNamespace(metrics={"policy_lr": RATE}),
        optim_step=lambda _model: 0.25, set_lr=lambda _model, rate: rates.append(rate), empty_cache=lambda: None,
        stage_data=lambda *_: [None],
    )  # fmt: skip
    trainer.all_timings, trainer.all_metrics = {}, {}

    class Configured(RayPPOTrainer):  # type: ignore[misc]
        has_critic = False

        def _normalize_advantages(self, data: Any, *_: Any) -> Any:
            return data

    trainer.__class__ = Configured
    connecting.connect(trainer, run_key="skyrl")
    trainer.train_critic_and_policy(batch)
    trainer.tracker.log(trainer.all_metrics, step=trainer.global_step, commit=True)
    Client.newest.told["rate"] = rates[0]


def areal() -> None:
    import torch
    from areal.api.cli_args import GenerationHyperparameters, PPOActorConfig
    from areal.trainer.ppo.actor import PPOActor
    from areal.trainer.rl_trainer import PPOTrainer

    store = torch._C._distributed_c10d.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    tokens, attention = sequences(7)
    moved = torch.roll(padded(PI, 7, left=PROMPT), -1, dims=1)
    batch = {"input_ids": tokens, "attention_mask": attention, "loss_mask": padded(SAMPLED, 7, left=PROMPT),
             "logprobs": padded(MU, 7, left=PROMPT), "prox_logp": moved, "rewards": torch.tensor([1.0, 0.0]),
             "versions": padded([[6] * 3, [6] * 5], 7, left=PROMPT).int() - 1}  # fmt: skip
    used: list[float] = []

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            used.append(self.param_groups[0]["lr"])

    optimizer = Optimizer([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    # AReaL's engines hand the actor's configuration of the trainer on to the actor.
    config = SimpleNamespace(
        path="m", optimizer=SimpleNamespace(lr=RATE), overlong_reward_penalty=False, use_decoupled_loss=True,
        recompute_logprob=True, rejection_sampling=None, **{
            name: getattr(PPOActorConfig, name)
            for name in ("eps_clip", "eps_clip_higher", "importance_sampling_level", "use_sapo_loss")
        },
    )  # fmt: skip

    class Actor(PPOActor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.config = config
            self.reward_bias, self.reward_scaling, self.reward_clip, self.reward_norm = 0.0, 1.0, 10.0, None
            self.kl_ctl, self.kl_estimator, self.mask_no_eos_with_zero = 0.0, lambda a, b: a - b, False
            self.discount = self.gae_lambda = 1.0
            self.adv_norm = None
            self.data_parallel_rank, self.data_parallel_world_size, self.optimizer = 0, 1, optimizer
            self.cpu_group = torch.distributed.group.WORLD

        def get_version(self) -> int:
            return 7

        def _ppo_update(self, data: Any) -> None:
            sampling = self.config.rejection_sampling
            Client.newest.told["sampling"] = [sampling.level, sampling.action, sampling.metric, sampling.upper]
            self.optimizer.step()

        def compute_advantages(self, data: Any) -> Any:
            return [self._compute_advantages(each) for each in data]

        def ppo_update(self, data: Any) -> None:
            self._ppo_update(data)

    trainer = PPOTrainer.__new__(PPOTrainer)
    sampling = GenerationHyperparameters(max_new_tokens=8)
    trainer.actor, trainer.config = (Actor(), SimpleNamespace(actor=config, gconfig=sampling, total_train_steps=8))
    trainer.stats_logger = SimpleNamespace(commit=lambda epoch, step, global_step, data: None)
    connecting.connect(trainer, run_key="areal")
    trainer.actor.ppo_update(trainer.actor.compute_advantages([batch]))
    trainer.stats_logger.commit(0, 7, 7, {"ppo_actor/task_reward/avg": 0.5})
    Client.newest.told["rate"] = used[0]


if __name__ == "__main__":
    import typing_extensions

    # pydantic refuses that of the standard library below Python 3.12, which SkyRL needs.
    typing.TypedDict = typing_extensions.TypedDict
    sys.path[:0] = sys.argv[2:]
    sys.meta_path.append(_Absent(sys.argv[2:]))
    # AReaL names formatters of a package that is absent.
    vars(logging.config)["dictConfig"] = lambda _: None
    vars(trainer_run).update(Client=Client, AdviceFeed=Feed)
    {"tinker-cookbook": tinker_cookbook, "openrlhf": openrlhf, "skyrl": skyrl, "areal": areal}[sys.argv[1]]()
    print(json.dumps(Client.newest.told))
