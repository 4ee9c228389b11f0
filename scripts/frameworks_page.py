"""Write docs/your-framework.md from the tables of frameworks and releases: `python -m scripts.frameworks_page`.

`--check` fails if it is stale.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.generated import write_or_check
from scripts.releases import RELEASES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "your-framework.md"


@dataclass(frozen=True, slots=True)
class Framework:
    """A row of the page `docs/your-framework.md`. `key`: its row of RELEASES; `lines`: what a user writes.

    `arrives` and `obeys` are words; `tried` is how it was tried: "training", "class" (released code runs connected),
    "dumps" (files of its own writer are imported), all three in `make test-all`; or "read" (its source was read, it was
    not run).
    """

    name: str
    key: str
    lines: tuple[str, ...]
    arrives: str
    obeys: str
    tried: str
    remark: str = ""


_CONNECT = "from foreshock.integrations.connect import connect"
_CONNECTION = "from foreshock.integrations.connect import Connection"
_CALLBACK = (
    "from foreshock.integrations.trl import ForeshockCallback",
    'trainer.add_callback(ForeshockCallback(trainer, run_key="my-run"))',
)
_VERL_LINE = ("FORESHOCK_URL=http://127.0.0.1:8765 python -m verl.trainer.main_ppo ...",)
_SLIME_LINES = (
    "--rollout-data-postprocess-path foreshock.integrations.slime.log_rollouts",
    "--custom-megatron-before-train-step-hook-path foreshock.integrations.slime.apply_advice",
)
_ALL = "rollouts, μ, π, scalars, checkpoints"
_BATCHES = "rollouts, μ, π, scalars"
_NOT = "nothing"
_BOTH = "rate, correction"
FRAMEWORKS: Final[tuple[Framework, ...]] = (
    Framework("TRL `GRPOTrainer`, `RLOOTrainer`", "trl", _CALLBACK, _ALL, _BOTH, "training",
              "correction: `GRPOTrainer`"),
    Framework("TRL `AsyncGRPOTrainer`", "trl", _CALLBACK, "scalars, checkpoints", "rate", "read",
              "its log-probs are computed inside its loss"),
    Framework("verl", "verl", _VERL_LINE, _ALL, _BOTH, "training"),
    Framework("verl, fully asynchronous", "verl", _VERL_LINE, f"{_BATCHES}, versions", _BOTH, "training"),
    Framework("slime", "slime", _SLIME_LINES, _ALL, _BOTH, "read", "the hooks run on Megatron-core"),
    Framework("vime", "vime", _SLIME_LINES, _ALL, _BOTH, "read"),
    Framework("miles", "miles", _SLIME_LINES, f"{_ALL}, versions", _BOTH, "read"),
    Framework("tinker-cookbook", "tinker-cookbook", ("from tinker_cookbook.rl import train", _CONNECT,
              'connect(train, run_key="my-run")'), _BATCHES, "rate", "class", "before `train.main(config)`"),
    Framework("AReaL", "areal", (_CONNECT, 'connect(trainer, run_key="my-run")'), f"{_BATCHES}, versions", _BOTH,
              "class", "after `with PPOTrainer(...) as trainer:`; not with its single controller"),
    Framework("SkyRL", "skyrl", (_CONNECT, 'connect(trainer, run_key="my-run")'), _BATCHES, "rate", "class",
              "in `get_trainer` of your `BasePPOExp`; or import its dumps"),
    Framework("NeMo-RL", "nemo-rl", ("foreshock import logs --format nemo-rl --follow --run-key my-run",),
              "rollouts, μ, π", _NOT, "dumps", "its own files; for scalars `log_metrics`, as for ROLL"),
    Framework("OpenRLHF", "openrlhf", (
        _CONNECTION, 'self.foreshock = Connection("openrlhf", run_key="my-run", model=args.actor.model_name_or_path)',
        "self.foreshock.log_rollouts(global_step + 1, experiences)",
        "self.foreshock.log_metrics(global_step, logs_dict)",
    ), _BATCHES, _NOT, "class", "a patch of `ppo_trainer.py`: in `__init__` of `BasePPOTrainer`, after "
              "`make_experience_batch`, and in `save_logs_and_checkpoints`; its optimizers are in other processes"),
    Framework("ROLL", "roll", (
        _CONNECTION, 'run = Connection("roll", run_key="my-run", model="Qwen3-4B")',
        "run.log_rollouts(global_step, batch)", "run.log_metrics(global_step, metrics)",
    ), _BATCHES, _NOT, "read", "a patch of its pipeline: before the loop, before `actor_train.train_step`, and beside "
              "`tracker.log`; its optimizers are in other processes"),
    Framework("prime-rl", "prime-rl", ("foreshock import outputs --format prime-rl --follow --run-key my-run",),
              "rollouts, μ, π, entropy, scalars", _NOT, "dumps", "with `trainer.enable_token_export = true`"),
    Framework("open-instruct", "open-instruct", ("foreshock import ROLLOUTS_SAVE_PATH --run-key my-run",),
              "rollouts, μ", _NOT, "read", "with `--save_traces`; μ alone: the mismatch needs a replay"),
    Framework("ms-swift", "ms-swift", _CALLBACK, "scalars, checkpoints", "rate", "read"),
    Framework("Unsloth", "unsloth", _CALLBACK, "rollouts, μ, scalars, checkpoints", "rate", "read",
              "on TRL; its matrix of log-probs has left padding and is refused"),
    Framework("Agent-Lightning", "agentlightning", _VERL_LINE, _ALL, _BOTH, "read", "its trainer is verl's"),
    Framework("rLLM `AgentWorkflowPPOTrainer`", "rllm", _VERL_LINE, _ALL, _BOTH, "read",
              "its trainer is verl's; its `VerlBackend` is not observed"),
)  # fmt: skip

INTRODUCTION = """\
# Your framework in N lines

Start a service with `foreshock serve`, install Foreshock in the trainer's environment, and add the lines of your
framework. Set `FORESHOCK_URL` if the service is not at `http://127.0.0.1:8765`, and `FORESHOCK_ADVICE_MODE=apply` and
`FORESHOCK_CORRECTION_MODE=apply` if the rate and the correction of the loss should follow the advice.

"""
LEGEND = """
**Arrives.** μ: the engine's log-probs of the sampled tokens; π: the trainer's. **Obeys.** What of the advice is
applied in mid-run; the rest is acknowledged as refused, with what to put into the configuration. **Tried.**
`training`: a real training of that release; `class`: its released code runs connected, its models and engines do not;
`dumps`: files that its own writer wrote are imported; all three in `make test-all`. `read`: its source was read, it was
not run.

A release that is not in the table gives one warning, and what does not fit the responses is left out with one,
which the page repeats. TRL, verl, slime and dumps have [a section each](integrations.md). For another framework, or a
loop of your own:

```python
import foreshock
from foreshock.integrations.connect import Connection

run = Connection("mine", run_key="my-run", model="Qwen3-4B", initial_learning_rate=1e-6)
run.log_rollouts(step, batch)  # tokens of whole sequences, a mask, log-probs, under any framework's names
run.log_metrics(step, metrics)
foreshock.apply_scale(optimizer, run.scale(step))
```

The other columns of `batch` end where its sequences end: [N, S], [N, S − 1] or [N, R]. Or pass columns to
[`Client.log_rollouts`](connect-a-trainer.md).
"""


def page() -> str:
    """Return the text of the page."""
    head = "| framework | release tried | lines | arrives | obeys | tried |\n| --- | --- | --- | --- | --- | --- |\n"
    table = "".join(f"{line(row)}\n" for row in FRAMEWORKS)
    alike: dict[tuple[str, ...], list[Framework]] = {}
    for row in FRAMEWORKS:
        alike.setdefault(row.lines, []).append(row)
    codes = "".join(code(lines, rows) for lines, rows in alike.items())
    end = "\nThis page is generated by `python -m scripts.frameworks_page`.\n"
    return f"{INTRODUCTION}{head}{table}{LEGEND}\n## The lines\n{codes}{end}"


def line(row: Framework) -> str:
    """Return the row of a framework."""
    release = RELEASES[row.key][-1].versions[-1]
    return f"| {row.name} | {release} | {len(row.lines)} | {row.arrives} | {row.obeys} | {row.tried} |"


def code(lines: tuple[str, ...], frameworks: Sequence[Framework]) -> str:
    """Return the lines of the frameworks that need the same ones, under their names."""
    names = ", ".join(f"**{each.name}**" + (f" ({each.remark})" if each.remark else "") for each in frameworks)
    imports = [each for each in lines if each.startswith("from ")]
    # A blank line after imports, as the formatter has it.
    printed = [*imports, *([""] if imports else []), *lines[len(imports) :]]
    return f"\n{names}\n\n```{'python' if imports else 'sh'}\n" + "\n".join(printed) + "\n```\n"


if __name__ == "__main__":
    sys.exit(write_or_check("frameworks_page", {PAGE: page()}))
