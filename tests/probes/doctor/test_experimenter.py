"""The torch experimenter replays what a plain forward pass computes, and says what it cannot try."""

import argparse
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from foreshock.doctor import CannotTryError, Change, examine
from foreshock.doctor.changes import BudgetSpentError
from foreshock.rollouts import RolloutBatch, encode_rollouts
from foreshock_probes.adapters import merge
from foreshock_probes.doctor import experimenter
from foreshock_probes.doctor.command import doctor, seconds
from foreshock_probes.doctor.experimenter import TorchExperimenter
from tests.probes.tiny import VOCABULARY, make_rollouts, one_by_one, save_checkpoint, save_mixture_of_experts


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("weights")
    return save_checkpoint(root / "step_0010", 1), save_checkpoint(root / "step_0007", 2)


def _rollouts(**logged: Any) -> RolloutBatch:
    """Return rollouts with these logged log-probs [T]."""
    plain = make_rollouts(24)
    kept = plain.select(np.flatnonzero(plain.response_lengths > 0))
    return replace(kept, group_ids=[f"g{row // 3}" for row in range(kept.num_rollouts)], **logged)


def _log_probs(experimenter: TorchExperimenter, batch: RolloutBatch, **change: Any) -> NDArray[np.float64]:
    logits = experimenter.logits(Change.of(**change)).astype(np.float64)
    values = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return np.asarray(values[np.arange(batch.num_tokens), batch.response_token_ids])


def test_a_float32_replay_is_the_plain_forward_pass(folders: tuple[Path, Path]) -> None:
    batch = _rollouts()
    experimenter = TorchExperimenter.of_folders(batch, folders[0], folders[0], [folders[1]])
    for folder in folders:
        replay = _log_probs(experimenter, batch, weights=folder.name, precision="float32")
        assert replay == pytest.approx(one_by_one(folder, batch), abs=2e-5)
    for composition in ("other", "decode"):
        other = _log_probs(experimenter, batch, weights="step_0010", precision="float32", composition=composition)
        assert other == pytest.approx(one_by_one(folders[0], batch), abs=2e-5)


def test_older_weights_are_found_from_two_folders(folders: tuple[Path, Path]) -> None:
    batch = _rollouts()
    logged = _rollouts(rollout_log_probs=one_by_one(folders[1], batch), trainer_log_probs=one_by_one(folders[0], batch))
    report = examine(logged, TorchExperimenter.of_folders(logged, folders[0], folders[0], [folders[1]]))
    assert [(each.side, each.cause, each.value) for each in report.causes] == [
        ("rollout", "other_weights", "step_0007")
    ]


def test_ids_beyond_the_vocabulary_are_another_tokenizer(folders: tuple[Path, Path]) -> None:
    batch = RolloutBatch.from_lists(["a"], [[1, 2]], [[VOCABULARY + 3, 1]])
    with pytest.raises(CannotTryError, match="another tokenizer"):
        TorchExperimenter.of_folders(batch, folders[0], folders[0])


def test_a_change_that_the_model_does_not_have_says_so(folders: tuple[Path, Path]) -> None:
    experimenter = TorchExperimenter.of_folders(_rollouts(), folders[0], folders[0])
    with pytest.raises(CannotTryError, match="num_experts"):
        experimenter.logits(Change.of(weights="step_0010", config=("num_experts_per_tok", 3)))


@pytest.mark.parametrize("save", [save_checkpoint, save_mixture_of_experts])
def test_packing_is_named_with_one_folder_of_weights(save: Callable[[Path, int], Path], tmp_path: Path) -> None:
    folder, batch = save(tmp_path / "step_0010", 1), _rollouts()
    packing: dict[str, Any] = {"precision": "bfloat16", "packed": (2, False)}
    plain = TorchExperimenter.of_folders(batch, folder, folder)
    logged = _log_probs(plain, batch, weights="step_0010", **packing).astype(np.float32)
    report = examine(_rollouts(rollout_log_probs=logged), TorchExperimenter.of_folders(batch, folder, folder))
    assert [(each.side, each.cause) for each in report.causes] == [("rollout", "packing")]


_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_WINDOWED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mistral", {"sliding_window": 4}),
    ("gemma2", {"sliding_window": 4, "head_dim": 16, "attn_logit_softcapping": 3.0}),
)


@pytest.mark.parametrize(("kind", "fields"), _WINDOWED)
def test_layers_keep_their_windows_under_another_mask(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **_SMALL, **heads, **fields), attn_implementation="eager"
    ).eval()
    model.save_pretrained(tmp_path)
    batch = _rollouts()
    prompts, responses = (
        np.split(ids, offsets[1:-1])
        for ids, offsets in (
            (batch.prompt_token_ids, batch.prompt_offsets),
            (batch.response_token_ids, batch.response_offsets),
        )
    )
    longest, padded = max(map(len, prompts)), []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = np.concatenate([np.zeros(longest - len(prompt)), prompt, response])
        with torch.no_grad():
            padded.append(model(torch.from_numpy(ids[None]).long(), use_cache=False).logits[0, longest - 1 : -1])
    experimenter = TorchExperimenter.of_folders(batch, tmp_path, tmp_path)
    found = experimenter.logits(Change.of(weights=tmp_path.name, precision="float32", visible="pads"))
    assert found == pytest.approx(torch.cat(padded).numpy(), abs=1e-4)


def test_another_base_of_one_kind_of_layer_is_named(tmp_path: Path) -> None:
    """Gemma 3 has a rotary embedding for its layers with a window and another for the others."""
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
             "full_attention": {"rope_type": "default", "rope_theta": 1e6}}  # fmt: skip
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.3}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    torch.manual_seed(1)
    configuration = AutoConfig.for_model("gemma3_text", **_SMALL, **heads, **kinds, rope_parameters=ropes)
    model = AutoModelForCausalLM.from_config(configuration)
    folders = [tmp_path / "announced", tmp_path / "engine"]
    for folder in folders:
        model.save_pretrained(folder)
    described = json.loads((folders[1] / "config.json").read_text())
    described["rope_parameters"]["full_attention"]["rope_theta"] = 1e4
    (folders[1] / "config.json").write_text(json.dumps(described))
    mu, pi = (one_by_one(folder, _rollouts()) for folder in reversed(folders))
    batch = _rollouts(rollout_log_probs=mu, trainer_log_probs=pi)
    report = examine(batch, TorchExperimenter.of_folders(batch, folders[0], folders[0]))
    assert [(each.side, each.cause) for each in report.causes] == [("rollout", "rope_theta")]
    assert "full_attention" in report.causes[0].value


def test_responses_without_a_prompt_can_be_packed(folders: tuple[Path, Path]) -> None:
    batch = RolloutBatch.from_lists(["a", "b"], [[], [1, 2]], [[3, 4], [5]])
    experimenter = TorchExperimenter.of_folders(batch, folders[0], folders[0])
    assert experimenter.logits(Change.of(weights="step_0010", packed=(2, True))).shape == (3, VOCABULARY)


def test_an_error_of_the_doctor_is_no_finding(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TypeError("a fault of the doctor")

    batch = _rollouts(rollout_log_probs=one_by_one(folders[1], _rollouts()))
    plain = TorchExperimenter.of_folders(batch, folders[0], folders[0])
    monkeypatch.setattr(experimenter, "quantised", broken)
    with pytest.raises(TypeError, match="a fault of the doctor"):
        examine(batch, plain)


@pytest.mark.parametrize(
    ("cause", "prompt", "edit"),
    [
        ("bos", ("before", 1), lambda each: [1, *each]),
        ("prompt_start", ("first", 2), lambda each: each[2:]),
        ("prompt_end", ("last", 1), lambda each: each[:-1]),
        ("prompt_truncated", ("keep", 3), lambda each: each[-3:]),
    ],
)
def test_another_prompt_of_the_engine_is_named(
    cause: str, prompt: tuple[str, int], edit: Callable[[list[int]], list[int]], folders: tuple[Path, Path]
) -> None:
    plain = _rollouts()
    random = np.random.default_rng(4)
    prompts = [random.integers(2, VOCABULARY, 4 + row % 3).tolist() for row in range(plain.num_rollouts)]
    edited = [edit(each) for each in prompts]
    mu, pi = (one_by_one(folders[0], _with_prompts(plain, each)) for each in (edited, prompts))
    batch = replace(_with_prompts(plain, prompts), rollout_log_probs=mu, trainer_log_probs=pi)
    experimenter = TorchExperimenter.of_folders(batch, folders[0], folders[0])
    report = examine(batch, experimenter)
    assert [(each.side, each.cause) for each in report.causes] == [("rollout", cause)]
    assert f" {prompt[1]} " in report.causes[0].value
    with pytest.raises(CannotTryError, match="a prompt would have no token"):
        experimenter.logits(Change.of(weights="step_0010", prompt=("first", 4)))


def _with_prompts(batch: RolloutBatch, prompts: list[list[int]]) -> RolloutBatch:
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in prompts])])
    ids = np.concatenate(prompts).astype(batch.prompt_token_ids.dtype)
    return replace(batch, prompt_token_ids=ids, prompt_offsets=offsets.astype(batch.prompt_offsets.dtype))


def test_quantised_gate_and_up_projections_are_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    held = shutil.copytree(folders[0], tmp_path / "held") / "model.safetensors"
    tensors = load_file(held)
    for name, value in tensors.items():
        if re.search(r"\.(gate|up)_proj\.", name):
            scale = value.abs().amax(1, keepdim=True) / 448
            tensors[name] = (value / scale).to(torch.float8_e4m3fn).to(value.dtype) * scale
    save_file(tensors, held, {"format": "pt"})
    batch = _rollouts()
    pi, mu = one_by_one(held.parent, batch), one_by_one(folders[0], batch)
    batch = _rollouts(trainer_log_probs=pi, rollout_log_probs=mu)
    report = examine(batch, TorchExperimenter.of_folders(batch, folders[0], folders[0]))
    assert [(each.side, each.cause, each.value) for each in report.causes] == [
        ("trainer", "quantised_weights", "fp8 per channel of gate and up")
    ]


def test_a_replay_ends_in_its_middle_when_the_budget_is_spent(folders: tuple[Path, Path]) -> None:
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise BudgetSpentError

    experimenter = TorchExperimenter.of_folders(_rollouts(), folders[0], folders[0])
    experimenter.check = check
    for change in ({}, {"composition": "decode"}, {"packed": (2, True)}):
        calls = 0
        with pytest.raises(BudgetSpentError):
            experimenter.logits(Change.of(weights="step_0010", **change))
        assert calls == 5


def test_other_weights_of_another_shape_cannot_be_tried(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path / "wider", 1, intermediate_size=96)
    experimenter = TorchExperimenter.of_folders(_rollouts(), folders[0], folders[0], [other])
    for change in ({"part": ("wider", "layers")}, {"delta": ("wider", 2.0)}):
        with pytest.raises(CannotTryError, match=r"wider has no tensor .*_proj\.weight of the announced"):
            experimenter.logits(Change.of(weights="step_0010", **change))


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("layer_types", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("rope_parameters", {"rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}}),
        ("rms_norm_eps", {"rms_norm_eps": 0.1}),
    ],
)
def test_a_field_in_which_the_configurations_of_both_sides_differ_is_named(
    field: str, settings: dict[str, Any], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    window = {"sliding_window": 2, "use_sliding_window": True}
    engine, trainer = tmp_path / "engine", tmp_path / "trainer"
    for folder, own in ((engine, settings), (trainer, {})):
        file = shutil.copytree(folders[0], folder) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | window | own))
    batch = _rollouts()
    batch = _rollouts(rollout_log_probs=one_by_one(engine, batch), trainer_log_probs=one_by_one(trainer, batch))
    report = examine(batch, TorchExperimenter.of_folders(batch, engine, trainer))
    assert [(each.side, each.cause) for each in report.causes] == [("both", "configuration")]
    assert report.causes[0].value.startswith(f"{field} = ")


def test_a_folder_without_weights_fails_at_once(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    batch = _rollouts()
    with pytest.raises(CannotTryError, match="cannot load"):
        TorchExperimenter.of_folders(batch, tmp_path, tmp_path)
    usable = TorchExperimenter.of_folders(batch, folders[0], folders[0], [tmp_path])
    assert list(usable.subject.unusable) == [tmp_path.name]


@pytest.mark.parametrize(
    ("held", "cause"),
    [
        (0.0, "other_weights base"),
        (2.0, "update_scaled twice since base"),
        (0.7, r"update_scaled times 0\.7 ± [\d.e-]+ since base"),
    ],
)
def test_an_adapter_that_is_missing_or_applied_with_another_scale_is_named(
    held: float, cause: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    base = shutil.copytree(folders[0], tmp_path / "base")
    adapter = _save_adapter(tmp_path / "adapter_0010", scale=1.0)
    merge(adapter, base, tmp_path / "merged")
    engine = base
    if held:
        engine = tmp_path / "engine"
        merge(_save_adapter(tmp_path / "scaled", scale=held), base, engine)
    batch = _rollouts()
    merged = one_by_one(tmp_path / "merged", batch)
    batch = _rollouts(rollout_log_probs=one_by_one(engine, batch), trainer_log_probs=merged)
    report = examine(batch, TorchExperimenter.of_folders(batch, adapter, adapter))
    assert [each.side for each in report.causes] == ["rollout"]
    assert re.fullmatch(cause, f"{report.causes[0].cause} {report.causes[0].value}")


def _save_adapter(folder: Path, scale: float) -> Path:
    """Save an adapter of the model in the folder `base` beside it, as PEFT does."""
    generator = torch.Generator().manual_seed(3)
    name = "base_model.model.model.layers.0.mlp.down_proj"
    weights = load_file(folder.parent / "base" / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    down = torch.randn((2, weights.shape[1]), generator=generator) * weights.float().std()
    up = torch.randn((weights.shape[0], 2), generator=generator)
    folder.mkdir()
    save_file({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA", "base_model_name_or_path": "base", "r": 2, "lora_alpha": 2 * scale,
        "target_modules": ["model.layers.0.mlp.down_proj"],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def test_logits_beyond_the_memory_are_refused(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = _rollouts()
    monkeypatch.setattr(experimenter, "_MOST_BYTES", 4 * batch.num_tokens * VOCABULARY // 3)
    with pytest.raises(CannotTryError, match=rf"about {batch.num_rollouts // 3} rollouts \(--rollouts, max_rollouts\)"):
        TorchExperimenter.of_folders(batch, folders[0], folders[0])


def _command(batch: RolloutBatch, folder: Path, *words: str) -> int:
    """Examine rollouts by the command."""
    file = folder / "step_0010.parquet"
    file.write_bytes(encode_rollouts(batch))
    parser = argparse.ArgumentParser()
    doctor.configure(parser)
    return doctor.run(parser.parse_args([str(file), *words]))


def test_the_command_reads_files_and_prints_the_report(
    tmp_path: Path, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    logged = _rollouts(trainer_log_probs=one_by_one(folders[0], _rollouts()))
    assert _command(logged, tmp_path, "--engine-weights", *map(str, folders)) == 0
    assert "ordinary rounding" in capsys.readouterr().out


def _with_config(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        held = json.loads((folder / "config.json").read_text())
        edit(held)
        (folder / "config.json").write_text(json.dumps(held))

    return change


@pytest.mark.parametrize(
    ("edit", "words", "says"),
    [
        (lambda folder: shutil.rmtree(folder), [], "there is no folder"),
        (lambda folder: (folder / "model.safetensors").unlink(), [], "cannot load"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"none"), [], "cannot load"),
        (lambda folder: (folder / "config.json").write_text("{"), [], "cannot load"),
        (_with_config(lambda held: held.pop("model_type")), [], "cannot load"),
        (_with_config(lambda held: held.pop("num_key_value_heads")), [], "cannot load"),
        (_with_config(lambda held: held.pop("vocab_size")), [], "cannot load"),
        (_with_config(lambda held: held.update(num_hidden_layers="two")), [], "cannot load"),
        (lambda folder: None, ["--budget", "0.001s"], "give more time or fewer rollouts"),
    ],
)
def test_weights_that_cannot_be_replayed_end_with_a_sentence(
    edit: Callable[[Path], Any],
    words: list[str],
    says: str,
    folders: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    held = shutil.copytree(folders[0], tmp_path / "held")
    edit(held)
    batch = _rollouts(trainer_log_probs=one_by_one(folders[0], _rollouts()))
    assert _command(batch, tmp_path, "--engine-weights", str(held), *words) == 1
    assert "foreshock doctor: cannot try anything: " in capsys.readouterr().err
    # The folder of the other side alone:
    if not words:
        sides = ["--engine-weights", str(folders[0]), "--trainer-weights", str(held)]
        assert _command(batch, tmp_path, *sides) == 1
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(("number", "prompt", "length"), [(3, 1, 6), (3, 0, 6), (3, 3, 2_000), (1, 1, 1)])
def test_few_rollouts_short_prompts_and_long_responses_are_reported(
    number: int, prompt: int, length: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rollout is enough for a report; what cannot be tried, or not in the time, is listed."""
    folder, random = save_checkpoint(tmp_path / "step_0010", 1, max_position_embeddings=4096), np.random.default_rng(1)
    ids = [[random.integers(0, VOCABULARY, size).tolist() for _ in range(number)] for size in (prompt, length)]
    plain = RolloutBatch.from_lists(["a", "b", "c"][:number], *ids)
    values = np.nan_to_num(one_by_one(folder, plain), nan=-1.0)
    noise = random.normal(0, 0.5, plain.num_tokens).astype(np.float32)
    batch = replace(plain, rollout_log_probs=np.minimum(values + noise, 0), trainer_log_probs=values)
    assert _command(batch, tmp_path, "--engine-weights", str(folder), "--budget", "8s") == 0
    said = capsys.readouterr().out
    assert "unknown: the engine's logged log-probs" in said
    assert "not tried: " in said


def test_a_budget_has_a_unit() -> None:
    assert [seconds(text) for text in ("90s", "10m", "1h")] == [90.0, 600.0, 3600.0]
