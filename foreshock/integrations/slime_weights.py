"""The notary in slime (`FORESHOCK_NOTARY=1`): what the training processes send, and what each engine then holds.

The updater's tensors are digested before they are sent, in each process a share of them. After its `update_weights` one
`all_gather` puts the digests together, and slime's engines, which are SGLang servers with Foreshock's action of
`/weights_checker`, answer with what they hold.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from foreshock.client.reporting import LogOnce
from foreshock.integrations.hooks import observe
from foreshock.notary.digests import tensors_of
from foreshock.notary.engines import of_sglang
from foreshock.notary.pieces import Piece, Tensors, joined

LogWeights = Callable[[Tensors, Mapping[str, Tensors]], None]

_SENDERS = {
    "UpdateWeightFromTensor": "_send_hf_params",
    "UpdateWeightFromDistributed": "_update_bucket_weights_from_distributed",
}
"""slime's updaters, and their methods that get pairs of name and tensor. Those by files and deltas are not observed."""


class WeightSync:
    """Calls `log_weights(sent, held)` after each sync; engines are numbered in slime's order.

    Every training process needs one. `log_weights` is None in all but the leading process; `group` returns slime's
    group of all processes on the CPU.
    """

    def __init__(self, log_weights: LogWeights | None, group: Callable[[], Any]) -> None:
        self._log_weights, self._group = log_weights, group
        self._sent: dict[str, list[Piece]] = {}
        self._tensors = 0

    def observe(self, actor: ModuleType, log: LogOnce) -> None:
        """Observe the updaters that slime's module `actor` uses."""
        found = False
        for name, send in _SENDERS.items():
            updater = getattr(actor, name, None)
            if updater is not None and observe(updater, send, log, before=self._digest):
                found |= observe(updater, "update_weights", log, before=self._begin, after=self._end)
        if not found:
            log.warning("notary", f"{actor.__name__} has none of {', '.join(_SENDERS)}: weights are not compared")

    def _begin(self, _arguments: Any, _keywords: Any) -> None:
        self._sent, self._tensors = {}, 0

    def _digest(self, arguments: tuple[Any, ...], _keywords: Any) -> None:
        from torch import distributed

        updater, named = arguments[:2]
        # All processes send all tensors to engines on their GPUs; to others, one process sends each.
        share = distributed.get_world_size() if hasattr(updater, "_send_hf_params") else 1
        mine = [
            pair for number, pair in enumerate(named, self._tensors) if number % share == distributed.get_rank() % share
        ]
        self._tensors += len(named)
        self._sent |= tensors_of(mine)

    def _end(self, arguments: tuple[Any, ...], _keywords: Any, _result: Any) -> None:
        import ray
        from torch import distributed

        group = self._group()
        reports: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(reports, self._sent, group=group)
        sent, updater = joined(reports), arguments[0]
        if self._log_weights is None or not sent:
            return
        engines = [*updater.rollout_engines, *getattr(updater, "distributed_rollout_engines", ())]
        answers = ray.get([engine.check_weights.remote(action="foreshock") for engine in engines])
        # For an engine on several nodes, only the first one answers.
        held = {str(number): of_sglang(answer) for number, answer in enumerate(answers) if answer is not None}
        self._log_weights(sent, held)
