"""The notary of the weights: 20 faults that it must name, 200 clean syncs without any report, and its cost.

    make bench-notary
    python -m benchmarks.notary engines

The faults are changes of tensors. A tiny model's weights over 41 steps go to eight engines of two tensor-parallel
ranks, which fuse, shard and pad them as vLLM and SGLang do. The cost for 70B parameters is computed from the measured
bytes per second of this machine, and from the memory traffic of a GPU. `engines` syncs checkpoints to a real SGLang and
a real vLLM on this machine, and queries both.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.bars import Line, report
from foreshock.diagnosis.weights import verdict_in_words
from foreshock.notary import Holding, ask_sglang, ask_vllm, judge, tensors_of
from tests.foreshock.notary.faults import Weights, announced, held, weights_of

STEP, CLEAN_SYNCS, ENGINES = 41, 204, 8
LARGEST_SHARE, STEP_SECONDS = 0.005, 10.0
PARAMETERS, TRAINER_GPUS, GPU_BYTES_PER_SECOND, TRAFFIC_PER_WORD = 70e9, 16, 3.35e12, 24.0
HEAD, UP, DOWN = "lm_head.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"

Fault = tuple[str, Holding, str]


def _swapped(name: str) -> Holding:
    pieces = held(TRUTH[STEP]).tensors
    first, second = pieces[name]
    places = [
        first._replace(row=second.row, column=second.column, rank=second.rank),
        second._replace(row=first.row, column=first.column, rank=first.rank),
    ]
    return Holding({**pieces, name: places})


def _with(**of_steps: int) -> Weights:
    weights = dict(TRUTH[STEP])
    for part, step in of_steps.items():
        weights |= {name: values for name, values in TRUTH[step].items() if part.replace("__", ".") in name}
    return weights


def _cast(*names: str) -> Callable[[torch.nn.Module, int], None]:
    def change(model: torch.nn.Module, rank: int) -> None:
        for name in names:
            model.get_submodule(name).half()

    return change


def _flip_a_bit(model: Any, rank: int) -> None:
    if rank == 1:
        model.model.layers[1].self_attn.o_proj.weight.data.view(torch.int16)[3, 2] ^= 1


TRUTH = {step: weights_of(step) for step in range(1, STEP + 1)}
DELTA = {name: 0.1 * torch.randn(values.shape) for name, values in TRUTH[1].items() if "q_proj.weight" in name}


def _adapted(times: int) -> Weights:
    return TRUTH[STEP] | {name: TRUTH[STEP][name] + times * delta for name, delta in DELTA.items()}


def _faults() -> Iterator[Fault]:
    """Yield each fault: what an engine holds, and what the notary must report."""
    now = TRUTH[STEP]
    yield "a head that was never sent again", held(_with(lm_head=1)), "step 41, except lm_head, which is of step 1"
    yield "a key of one layer", held(_with(layers__1__self_attn__k_proj__w=40)), "k_proj, which is of step 40"
    yield "a gate of a fused layer", held(_with(layers__0__mlp__gate=30)), "mlp.gate_proj, which is of step 30"
    yield "a norm, one step late", held(_with(model__norm=40)), "except norm, which is of step 40"
    yield "an embedding that never changes", held(_with(embed=1)), "except embed_tokens, which is of step 1"
    yield (
        "two tensors of two steps",
        held(_with(lm_head=2, embed=7)),
        "lm_head, which is of step 2; and embed_tokens, which is of step 7",
    )
    yield "an engine one step late", held(TRUTH[40]), "holds step 40, while the trainer is at step 41"
    yield "an engine two steps late", held(TRUTH[39]), "holds step 39, while"
    yield "an engine that never synced", held(TRUTH[1]), "holds step 1, while"
    yield "late, and its head later", held(TRUTH[40] | {HEAD: TRUTH[3][HEAD]}), "holds step 40, except lm_head, which"
    yield (
        "a sync that broke off",
        held(_with(layers__1=40, lm_head=40, model__norm=40)),
        "which are of step 41; the trainer is",
    )
    yield "another dtype of a head", held(now, change=_cast("lm_head")), "lm_head, which is in float16"
    yield "another dtype of all", held(now, dtype=torch.float16), "float16 instead of bfloat16, so that"
    yield "ranks swapped, by rows", _swapped(UP), "up_proj, of which ranks 0 and 1 hold each other's part"
    yield "ranks swapped, by columns", _swapped(DOWN), "down_proj, of which ranks 0 and 1 hold each other's part"
    ranks = [held(TRUTH[step]).tensors for step in (41, 40)]
    mixed = {name: [ranks[0][name][0], ranks[1][name][1]] for name in ranks[0]}
    yield "a rank that missed the sync", Holding(mixed), "a copy on rank 1 is of step 40"
    yield "a rank that does not answer", Holding({**ranks[0], HEAD: ranks[0][HEAD][:1]}), "lm_head, of which parts are"
    yield "one bit of one tensor", held(now, change=_flip_a_bit), "layers.1.self_attn.o_proj, which is not what"
    yield "weights of another model", held({name: each + 1 for name, each in now.items()}), "never announced"
    yield (
        "a copy of a tied head",
        Holding({**held(weights_of(STEP, tied=True)).tensors, **_old_copy()}),
        "lm_head, which",
    )
    yield "an adapter that is missing", held(_adapted(0)), "step 41 without the adapter"
    yield "an adapter applied twice", held(_adapted(2)), "step 41 with the adapter applied twice"


def _old_copy() -> Mapping[str, Any]:
    embeddings = "model.embed_tokens.weight"
    return {HEAD: held(weights_of(1, tied=True)).tensors[embeddings]}


def _announced_for(title: str) -> tuple[dict[int, Holding], dict[str, Any]]:
    if "tied" in title:
        return {step: announced(weights_of(step, tied=True)) for step in (1, 40, STEP)}, {}
    if "adapter" not in title:
        return ANNOUNCED, {}
    variants = {"without the adapter": _adapted(0), "with the adapter applied twice": _adapted(2)}
    chosen = {
        what: tensors_of({name: weights[name] for name in DELTA}, torch.bfloat16) for what, weights in variants.items()
    }
    return {**ANNOUNCED, STEP: announced(_adapted(1))}, chosen


ANNOUNCED = {step: announced(weights) for step, weights in TRUTH.items()}


def _false_alarms() -> int:
    """Return the number of clean syncs in which the notary reports any of eight engines, of one rank or of two.

    Every other run ties its head; in every third, some parts are frozen, as with an adapter.
    """
    alarms = 0
    for tied, frozen in product((False, True), (False, False, True)):
        start = weights_of(1, tied=tied)
        fixed = {name: values for name, values in start.items() if frozen and "mlp" in name}
        history = {1: announced(start)}
        for step in range(2, 2 + -(-CLEAN_SYNCS // 6)):
            weights = weights_of(step, tied=tied) | fixed
            history[step] = announced(weights)
            reports = [held(weights, shards) for shards in (1, 2)]
            verdicts = [judge(step, history, reports[engine % 2]) for engine in range(ENGINES)]
            alarms += not all(verdict is not None and verdict.is_right for verdict in verdicts)
    return alarms


def _bytes_per_second() -> tuple[float, float]:
    """Return the rates at which one thread digests and copies a tensor: the best of ten rounds."""
    values = torch.randn(2048, 4096).bfloat16()
    copied = torch.empty_like(values)

    def best(work: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(11):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return values.nbytes / min(seconds[1:])

    return best(lambda: tensors_of({"w": values})), best(lambda: copied.copy_(values))


SYNCS = 10


def _host_seconds(tensors: int = 723) -> float:
    """Return the median CPU time of a sync of a 70B model in the client's threads, without the digests."""
    from foreshock.client.deliveries import Registration, weights

    pieces = {
        f"model.layers.{number // 9}.self_attn.q_proj_{number % 9}.weight": ANNOUNCED[1].tensors[HEAD]
        for number in range(tensors)
    }
    registration = Registration({"project": "p", "key": "k"}, {"key": "a"})
    found = []
    for _ in range(SYNCS):
        start = time.process_time()
        holdings = {str(engine): Holding(dict(pieces)) for engine in range(ENGINES)}
        weights(registration, 1, Holding(pieces), holdings, {}, None)
        found.append(time.process_time() - start)
    # The first sync of a process also imports what encodes a report.
    return median(found[1:])


def _ask_real_engines() -> bool:
    """Sync three checkpoints to a real vLLM and a real SGLang; return whether the notary names what each one holds."""
    import os

    from safetensors.torch import load_file

    from examples.tiny_rl import sglang_sampler
    from tests.probes.tiny import save_checkpoint

    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        folders = [save_checkpoint(root / f"step_{step}", seed=step) for step in range(3)]
        weights = [load_file(folder / "model.safetensors") for folder in folders]

        def judged(dtype: torch.dtype, step: int, tensors: Any) -> str:
            known = {number: Holding(tensors_of(each, dtype)) for number, each in enumerate(weights[: step + 1])}
            verdict = judge(step, known, Holding(tensors))
            assert verdict is not None
            print(f"{verdict.compared} of {verdict.tensors} tensors. {verdict_in_words('0', 1, verdict)}")
            return verdict_in_words("0", 1, verdict)

        # SGLang finds the entry point of an installed Foreshock; here a folder provides it.
        plugin = root / "plugins" / "foreshock_notary-1.dist-info"
        plugin.mkdir(parents=True)
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: foreshock-notary\nVersion: 1\n")
        entry = "foreshock = foreshock.notary.engines:add_to_sglang"
        (plugin / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{entry}\n")
        paths = os.pathsep.join(map(str, (sglang_sampler.SGLANG, plugin.parent, Path(__file__).parents[1])))
        with sglang_sampler.running_sglang(folders[0], root / "log", path=paths) as server:
            said = [judged(torch.float32, 2, ask_sglang(str(server.base_url)))]
            server.post("/update_weights_from_disk", json={"model_path": str(folders[2])}).raise_for_status()
            said.append(judged(torch.float32, 2, ask_sglang(str(server.base_url))))
        from vllm import LLM

        llm = LLM(
            str(folders[0]), dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64,
            worker_extension_cls="foreshock.notary.engines.WorkerExtension",
        )  # fmt: skip
        said.append(judged(torch.bfloat16, 2, ask_vllm(llm)))
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folders[2])})
        said.append(judged(torch.bfloat16, 2, ask_vllm(llm)))
    return said == 2 * ["Engine 0 holds step 0, while the trainer is at step 2.", "Engine 0 holds step 2."]


def main() -> int:
    """Measure and print; return 1 below a bar."""
    torch.set_num_threads(1)
    if sys.argv[1:] == ["engines"]:
        return 0 if _ask_real_engines() else 1
    named, count = 0, 0
    for title, holding, expected in _faults():
        history, variants = _announced_for(title)
        verdict = judge(STEP, history, holding, variants=variants)
        sentence = "nothing" if verdict is None else verdict_in_words("3", 8, verdict)
        is_named = expected in sentence and verdict is not None and not verdict.is_right
        named, count = named + is_named, count + 1
        print(f"{title:34} {'named ' if is_named else 'MISSED'} {sentence}")
    alarms, (speed, copied), host = _false_alarms(), _bytes_per_second(), _host_seconds()
    gpu = PARAMETERS * 2 / 4 * TRAFFIC_PER_WORD / GPU_BYTES_PER_SECOND / TRAINER_GPUS
    # A copy moves each byte twice. Relative to memory, integer arithmetic is slower on a CPU than on a GPU.
    by_ratio = PARAMETERS * 2 * 2 / GPU_BYTES_PER_SECOND / TRAINER_GPUS * copied / speed
    share, share_by_ratio = ((seconds + host) / STEP_SECONDS for seconds in (gpu, by_ratio))
    print(
        f"measured: one thread of this CPU digests {speed / 1e9:.2f} GB/s and copies {copied / 1e9:.2f} GB/s; the "
        f"client's threads take {1e3 * host:.1f} ms a sync"
    )
    print(
        f"worked out, 70B on {TRAINER_GPUS} GPUs of {GPU_BYTES_PER_SECOND / 1e12:.2f} TB/s: {1e3 * gpu:.1f} ms a sync "
        f"by traffic, {1e3 * by_ratio:.0f} ms by the measured ratio; with the client {100 * share:.2f} % and "
        f"{100 * share_by_ratio:.2f} % of a step of {STEP_SECONDS:g} s"
    )
    return report(
        [
            Line("named", "faults that are named", named, max(count, 20), at_least=True),
            Line("false_alarms", f"false alarms in {CLEAN_SYNCS} clean syncs of {ENGINES} engines", alarms, 0),
            Line("share_of_step", "share of a step", share, LARGEST_SHARE),
        ],
        faults=count,
        bytes_per_second=speed,
        host_seconds=host,
        copied_bytes_per_second=copied,
        share_by_ratio=share_by_ratio,
    )


if __name__ == "__main__":
    sys.exit(main())
