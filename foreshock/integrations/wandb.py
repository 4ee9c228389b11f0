"""Mirror a W&B run: what is logged there is also logged to Foreshock, by one line after `wandb.init`.

    wandb.init(project="my-project")
    foreshock.watch_wandb()

Numbers become scalars, nested ones as `group/name`. A `wandb.Table` with the columns of rollouts
(docs/rollout-table.md; at least `prompt_token_ids` and `response_token_ids`) becomes the rollouts of the step.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from foreshock.client.client import Client, page_in_wandb
from foreshock.client.reporting import LogOnce
from foreshock.errors import ConfigurationError
from foreshock.integrations.hooks import is_number, observe
from foreshock.rollouts.schema import ROLLOUT_COLUMNS

_COLUMNS = {column.name for column in ROLLOUT_COLUMNS}
_REQUIRED = {"prompt_token_ids", "response_token_ids"}
# What `Client(export="wandb")` writes into the same run.
_OWN = "foreshock/"


def watch_wandb(run: Any = None, *, client: Client | None = None, **description: Any) -> Client:
    """Mirror a W&B run, by default the active one, and return the client.

    The step is that of `log(…, step=…)`, else the number of W&B's row. The run's key is the id of the W&B run, so that
    a resumed run continues; `description` are arguments of `Client.start_run`. `run.finish()` ends the run and delivers
    what is left. Nothing raises into the trainer. Raises ConfigurationError if there is no W&B run.
    """
    import wandb

    run = wandb.run if run is None else run
    if run is None:
        raise ConfigurationError("there is no active W&B run in this process: call wandb.init() first, or give the run")
    log = LogOnce("foreshock.integrations.wandb")
    client = client or Client(run_key=run.id)
    client.tell_remarks_of(log)
    known = {"name": run.name or run.id, "tracker_url": page_in_wandb(run), "resume_step": run.step}
    client.start_run(**{**known, **description})

    def mirror(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        named = dict(zip(("data", "step", "commit"), arguments, strict=False)) | keywords
        step = run.step if named.get("step") is None else int(named["step"])
        numbers = {}
        for name, value in _flat(named["data"]):
            if isinstance(value, wandb.Table):
                _log_table(client, step, name, value, log)
            elif is_number(value):
                numbers[name] = float(value)
        if numbers:
            client.log_scalars(step, numbers)

    def end(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        client.finish(failed=bool(arguments[0] if arguments else keywords.get("exit_code")))
        client.close()

    is_active = wandb.run is run
    observe(run, "log", log, before=mirror)
    observe(run, "finish", log, before=end)
    if is_active:
        # A bound method of before, which `wandb.log(…)` calls.
        wandb.log = run.log
    return client


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}/")
        elif not f"{above}{name}".startswith(_OWN):
            yield f"{above}{name}", value


def _log_table(client: Client, step: int, name: str, table: Any, log: LogOnce) -> None:
    """Log a table that has the columns of rollouts; say once what another one lacks that has some of them."""
    known = [str(column) for column in table.columns if str(column) in _COLUMNS]
    lacks = sorted(_REQUIRED - set(known))
    if lacks and known:
        log.warning(
            f"table {name}", f"the table {name!r} is not logged as rollouts: it has no column {', '.join(lacks)}"
        )
    if not lacks:
        places = [list(map(str, table.columns)).index(column) for column in known]
        client.log_rollouts(
            step, {column: [row[at] for row in table.data] for column, at in zip(known, places, strict=True)}
        )
