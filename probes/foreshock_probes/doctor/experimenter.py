"""The experimenter of the doctor in torch: replay safetensors folders on the CPU under a change.

The values of a change: `weights` (a folder's name), `part` (name, part: that part of other weights), `delta` (name, λ:
other weights + λ · (announced weights − other weights)), `quantise`, `activations`, `tensors` (an edit and its
arguments), `config` (field, value; one field), `prompt` (kind, id or number), `positions`, `visible`, `packed`, `kv`,
`attention_scale`, `prompt_weights`, `precision` and `composition` (other batches). `catalogue` explains each of them.
"""

import copy
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.modules.module import register_module_forward_pre_hook

from foreshock.doctor.changes import CannotTryError, Change, Subject, json_value
from foreshock.rollouts import RolloutBatch
from foreshock_probes.adapters import AdapterError, base_folder_of, is_adapter, merged_model
from foreshock_probes.doctor.engines import EngineReplays
from foreshock_probes.doctor.forward import ATTENTION, logits_of, refused_by_model
from foreshock_probes.doctor.tensors import State, edited, quantised
from foreshock_probes.scorers.forward_pass import load_model
from foreshock_probes.scorers.request import UnsupportedScoreError

_CACHED_BYTES = min(8 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
"""Most bytes of cached logits, of all replays together."""
_MOST_BYTES = _CACHED_BYTES // 4
"""Most bytes of one replay's logits: the cache must hold those of the precisions and of a variant at the same time."""
_OF_INPUTS = ("prompt", "positions", "visible", "packed", "prompt_weights", "composition")
"""Values of a change that concern what a model gets, not the model."""
_NEEDED_FIELDS = ("num_hidden_layers", "vocab_size", "hidden_size", "num_attention_heads")
_USUAL_BOS = (0, 1, 2)
"""Ids of the beginning of a sequence in most tokenizers, besides the configuration's."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "bfloat16_head32": torch.bfloat16}


class TorchExperimenter:
    """Replays `batch` with the weights in `folders`, by name; `announced` maps each side to the name of its weights.

    `versions`: known weights versions by name. `unusable`: names without a folder, with the reason. `bases`: the base
    model of each folder that is an adapter. `engines` replays with the scorers `asked`. Raises CannotTryError if the
    weights of a side cannot be loaded or lack token ids of the rollouts, or if the logits of a replay do not fit into
    memory.
    """

    def __init__(
        self,
        batch: RolloutBatch,
        folders: Mapping[str, Path],
        announced: Mapping[str, str],
        versions: Mapping[str, int] | None = None,
        unusable: Mapping[str, str] | None = None,
        bases: Mapping[str, Path] | None = None,
        threads: int = 0,
        engines: EngineReplays | None = None,
        asked: Sequence[str] = (),
    ) -> None:
        if threads:
            torch.set_num_threads(threads)
        self.check: Callable[[], None] = lambda: None
        self._engines = engines
        self._batch, self._folders, self._bases = batch, dict(folders), dict(bases or {})
        self._held: tuple[Change, Any] | None = None
        self._loaded: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {}
        self._logits: dict[tuple[Change, tuple[int, ...]], NDArray[np.float32]] = {}
        lost = dict(unusable or {})
        for name in folders:
            try:
                self._load(name)
            except CannotTryError as error:
                if name in announced.values():
                    raise
                lost[name] = str(error)
        usable = tuple(self._loaded)
        config = self._loaded[announced["rollout"]][0]
        self.subject = Subject(
            announced=announced,
            weights=usable,
            configurations={name: self._loaded[name][0].to_dict() for name in usable},
            versions={name: version for name, version in (versions or {}).items() if name in usable},
            unusable=lost,
            layers=int(config.num_hidden_layers),
            tensors=tuple(self._loaded[announced["rollout"]][1]),
            longest=int((np.diff(batch.prompt_offsets) + np.diff(batch.response_offsets)).max(initial=0)),
            ends=_ends(config),
            **_prompts(batch, config),
            engines=tuple(asked),
        )

    @classmethod
    def of_folders(
        cls,
        batch: RolloutBatch,
        engine: Path,
        trainer: Path,
        others: Sequence[Path] = (),
        threads: int = 0,
        engines: EngineReplays | None = None,
        asked: Sequence[str] = (),
    ) -> Self:
        """Return an experimenter whose names are those of the folders; the last number in a name is its version."""
        folders = list(dict.fromkeys(path.resolve() for path in (engine, trainer, *others)))
        try:
            bases = {folder: base_folder_of(folder) for folder in folders if is_adapter(folder)}
        except AdapterError as error:
            raise CannotTryError(str(error)) from error
        folders = list(dict.fromkeys([*folders, *bases.values()]))
        names = _names(folders)
        announced = {"rollout": names[0], "trainer": names[folders.index(trainer.resolve())]}
        versions = {name: int(found[-1]) for name in names if (found := re.findall(r"\d+", name))}
        of_adapters = {name: bases[folder] for name, folder in zip(names, folders, strict=True) if folder in bases}
        return cls(
            batch, dict(zip(names, folders, strict=True)), announced, versions, {}, of_adapters, threads, engines, asked
        )

    def logits(self, change: Change, rows: tuple[int, ...] = ()) -> NDArray[np.float32]:
        """Return the logits [T, V] before each response token of `rows` (empty: all) under `change`.

        Raises CannotTryError.
        """
        if change.get("engine") is not None:
            raise CannotTryError("an engine gives no logits, and is asked only about the announced weights")
        if rows and (whole := self._logits.get((change, ()))) is not None:
            inside = np.repeat(np.isin(np.arange(self._batch.num_rollouts), rows), self._batch.response_lengths)
            return np.asarray(whole[inside])
        if (change, rows) not in self._logits:
            found = self._replayed(change, self._batch.select(list(rows)) if rows else self._batch)
            while self._logits and sum(each.nbytes for each in self._logits.values()) + found.nbytes > _CACHED_BYTES:
                self._logits.pop(next(iter(self._logits)))
            self._logits[change, rows] = found
        return self._logits[change, rows]

    def log_probs(self, engine: str) -> NDArray[np.float32]:
        """Return the log-probs [T] of a real engine with the engine's announced weights. Raises CannotTryError."""
        self.check()
        if self._engines is None:
            raise CannotTryError("no engine may be asked")
        return self._engines.log_probs(engine)

    def _replayed(self, change: Change, batch: RolloutBatch) -> NDArray[np.float32]:
        if change.get("prompt") is not None:
            batch = _with_prompts(batch, *change.get("prompt"))
        model = self._model(change)
        cached = None
        if change.get("prompt_weights") is not None:
            cached = self._model(change.plus(Change.of(weights=change.get("prompt_weights"))))
        pad = model.config.pad_token_id
        longest = int(np.diff(self._batch.prompt_offsets).max(initial=0))
        pad = int(pad) if isinstance(pad, int) and pad >= 0 else 0
        # Called at each module of the model: a pass over long responses can take longer than the whole budget.
        with register_module_forward_pre_hook(lambda *_: self.check()):
            found = logits_of(model, cached, batch, change, pad, longest)
        if not np.isfinite(found).all():
            raise CannotTryError("the forward pass gives values that are not finite")
        return found

    def _load(self, name: str) -> None:
        if not self._folders[name].is_dir():
            raise CannotTryError(f"there is no folder {self._folders[name]}")
        try:
            if name in self._bases:
                model = merged_model(self._folders[name], self._bases[name])
            else:
                model = load_model(self._folders[name], torch.float32, "sdpa", torch.device("cpu"))
        except (UnsupportedScoreError, AdapterError) as error:
            raise CannotTryError(f"{name}: {error}") from error
        lacking = [each for each in _NEEDED_FIELDS if not isinstance(getattr(model.config, each, None), int)]
        if lacking:
            raise CannotTryError(f"{name}: config.json of a {model.config.model_type} has no {lacking[0]}")
        ids = max(self._batch.response_token_ids.max(initial=0), self._batch.prompt_token_ids.max(initial=0))
        if ids >= model.config.vocab_size:
            raise CannotTryError(
                f"{name} has a vocabulary of {model.config.vocab_size} ids and the rollouts have the id {ids}: "
                "they are of another tokenizer"
            )
        size = 4 * self._batch.num_tokens * model.config.vocab_size
        if size > _MOST_BYTES:
            fewer = max(1, self._batch.num_rollouts * _MOST_BYTES // size)
            raise CannotTryError(
                f"the logits of {self._batch.num_tokens} tokens and {model.config.vocab_size} ids take "
                f"{size / 1e9:.0f} GB, more than {_MOST_BYTES / 1e9:.0f}: examine about {fewer} rollouts "
                "(--rollouts, max_rollouts)"
            )
        state = {key: value.detach() for key, value in model.state_dict().items()}
        self._loaded[name] = (model.config, state)

    def _model(self, change: Change) -> Any:
        """Return the model under a change; the last one is kept, as a variant is screened before it is replayed."""
        own = Change(tuple(each for each in change.values if each[0] not in _OF_INPUTS))
        if self._held is None or self._held[0] != own:
            self._held = None  # memory for one copy of the weights, not two
            self._held = own, self._built(own)
        return self._held[1]

    def _built(self, change: Change) -> Any:
        from transformers import AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        config, state = self._loaded[change.get("weights")]
        config, state = copy.deepcopy(config), edited(dict(state), change, config, self._tensors_of)
        if change.get("config") is not None:
            field, value = change.get("config")
            set_field(config, field, json_value(value))
        if "lm_head.weight" in state and (change.get("part") or change.get("tensors", ("",))[0] == "embeddings"):
            config.tie_word_embeddings = False  # the change may concern one of the two
        needs_own = change.get("kv") is not None or change.get("attention_scale", 1.0) != 1.0
        needs_own |= any(getattr(config, each, None) for each in ("attn_logit_softcapping", "sliding_window"))
        config._attn_implementation = ATTENTION if needs_own else "sdpa"
        with no_init_weights(), refused_by_model():
            model = AutoModelForCausalLM.from_config(config, attn_implementation=config._attn_implementation)
        if config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        with refused_by_model():  # if tensors have another shape
            lacking, surplus = model.load_state_dict(state, strict=False)
        if surplus or set(lacking) - {"lm_head.weight"}:
            raise CannotTryError(f"the changed configuration needs other tensors: {[*lacking, *surplus][0]}")
        model.tie_weights()
        kind = change.get("precision")
        model = model.eval().to(_DTYPES.get(kind, torch.float32))
        if kind == "bfloat16_head32":
            _head_in_float32(model)
        if (format_ := change.get("activations")) is not None:
            for each in model.modules():
                if isinstance(each, torch.nn.Linear) and each is not model.get_output_embeddings():
                    each.register_forward_pre_hook(lambda _, inputs: (quantised(inputs[0], format_),))
        return model

    def _tensors_of(self, weights: str, like: State) -> State:
        """Return the tensors of `weights` with the names of `like`. Raises CannotTryError if one has another shape."""
        other = self._loaded[weights][1]
        differing = [name for name, value in like.items() if name not in other or other[name].shape != value.shape]
        if differing:
            raise CannotTryError(f"{weights} has no tensor {differing[0]} of the announced weights' shape")
        return {name: other[name] for name in like}


def set_field(config: Any, field: str, value: Any) -> None:
    """Set a field of a configuration; fields of the rotary embedding are in its dictionary `rope_parameters`."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    of_rope = {"rope_parameters": value, "rope_theta": {**rope, "rope_theta": value}}
    of_rope["rope_factor"] = {**rope, "rope_type": "linear", "factor": value}
    name = "rope_parameters" if field in of_rope else field
    if not hasattr(config, name):
        raise CannotTryError(f"the configuration has no field {name!r}")
    setattr(config, name, of_rope.get(field, value))


def _names(folders: Sequence[Path]) -> list[str]:
    """Return a short name for each folder: its own, with parents if two have the same."""
    for depth in range(1, 4):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _prompts(batch: RolloutBatch, config: Any) -> dict[str, Any]:
    """Return what is known of the prompts, as fields of a subject."""
    prompts = np.split(batch.prompt_token_ids, batch.prompt_offsets[1:-1])
    shortest = min(map(len, prompts), default=0)
    firsts = np.stack([each[:shortest] for each in prompts]) if prompts else np.zeros((0, 0), np.int32)
    differing = np.flatnonzero((firsts != firsts[:1]).any(axis=0))
    common = int(differing[0]) if differing.size else shortest
    known = [int(firsts[0, 0])] if common else []
    known += [each for each in (config.bos_token_id, *_USUAL_BOS, config.pad_token_id) if isinstance(each, int)]
    ids = tuple(dict.fromkeys(each for each in known if 0 <= each < config.vocab_size))
    return {"shortest_prompt": shortest, "common_prompt": common, "first_ids": ids}


def _with_prompts(batch: RolloutBatch, kind: str, number: int) -> RolloutBatch:
    """Return the rollouts with edited prompts: an id before the first one, or ids left out. Raises CannotTryError."""
    edits = {
        "before": lambda each: np.concatenate([np.array([number], each.dtype), each]),
        "first": lambda each: each[number:],
        "last": lambda each: each[:-number],
        "keep": lambda each: each[-number:],
    }
    prompts = [edits[kind](each) for each in np.split(batch.prompt_token_ids, batch.prompt_offsets[1:-1])]
    if not all(map(len, prompts)):
        raise CannotTryError("a prompt would have no token")
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in prompts])])
    return replace(
        batch,
        prompt_token_ids=np.concatenate(prompts).astype(batch.prompt_token_ids.dtype),
        prompt_offsets=offsets.astype(batch.prompt_offsets.dtype),
    )


def _ends(config: Any) -> tuple[int, ...]:
    """Return the token ids that end sequences by the configuration."""
    eos = config.eos_token_id
    return tuple(eos) if isinstance(eos, list) else (eos,) if isinstance(eos, int) else ()


def _head_in_float32(model: Any) -> None:
    head = model.get_output_embeddings()
    weight = head.weight.float()
    head.forward = lambda hidden: torch.nn.functional.linear(hidden.float(), weight)
