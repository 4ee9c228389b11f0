"""A certification with stand-ins for engines: what is written if they die, refuse, are slow or are interrupted."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from foreshock.certify.certificate import Certificate, read_certificate
from foreshock.errors import ConfigurationError
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import RolloutBatch, ScoreBatch, decode_rollouts, encode_rollouts, encode_scores
from foreshock_probes.certify.certification import Asked, Certification, given_rollouts
from foreshock_probes.certify.command import certify
from foreshock_probes.certify.conditions import Condition
from foreshock_probes.certify.explaining import Explanations, Why
from foreshock_probes.certify.parts import Part, Work
from foreshock_probes.certify.prompts import long_prompts, prompts_of
from foreshock_probes.engines.process import JobAbandonedError
from tests.probes.adapted import save_adapter
from tests.probes.tiny import VOCABULARY, save_checkpoint

ENGINES: dict[str, dict[str, object]] = {"vllm.decode": {}, "vllm.prefill": {}}
NOISE = {"torch.bfloat16": 0.01, "torch.trainer": 0.01, "torch.float32": 1e-6, "trainer": 0.01}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "m", seed=0)


class Engines:
    """Does parts at once: log-probs that depend on the token alone, with the noise of each precision."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: list[str] = []
        self.before: Callable[[Part], None] = lambda part: None
        self.problems: dict[str, str] = {}
        self.shift: dict[str, float] = {}

    def do(self, work: Work, parts: Sequence[Part], abandoned: Callable[[], bool]) -> None:
        self.folder = work._folder
        for part in parts:
            self.before(part)
            if abandoned():
                raise JobAbandonedError("over")
            self.done.append(part.name)
            if part.name in self.problems:
                (self.folder / f"{part.name}.problem").write_text(self.problems[part.name])
                continue
            if part.rollouts in self.problems:
                (self.folder / f"{part.name}.problem").write_text("not sampled")
                continue
            batch = decode_rollouts((self.folder / f"{part.rollouts}.rollouts").read_bytes())
            if part.sampling is not None:
                self._sample(part, batch)
                continue
            if part.first:
                batch = batch.select(list(range(part.first)))
            values = self._log_probs(batch, part.name)
            scores = ScoreBatch(batch.sample_ids, values, batch.response_offsets, Fingerprint("fake"))
            (self.folder / f"{part.name}.scores").write_bytes(encode_scores(scores))

    def _sample(self, part: Part, prompts: RolloutBatch) -> None:
        assert part.sampling is not None
        random = np.random.default_rng(part.sampling.seed)
        ids = [random.integers(0, VOCABULARY, part.sampling.tokens).tolist() for _ in range(prompts.num_rollouts)]
        rows = np.split(prompts.prompt_token_ids, prompts.prompt_offsets[1:-1])
        made = RolloutBatch.from_lists(
            prompts.sample_ids, [row.tolist() for row in rows], ids, group_ids=prompts.group_ids,
            finish_reasons=["stop"] * len(ids), rollout_log_probs=[[-1.0] * len(each) for each in ids],
        )  # fmt: skip
        values = self._log_probs(made, "engine")
        offsets = made.response_offsets[1:-1]
        logged = RolloutBatch.from_lists(
            made.sample_ids, [row.tolist() for row in rows], ids, group_ids=made.group_ids,
            finish_reasons=made.finish_reasons, rollout_log_probs=[each.tolist() for each in np.split(values, offsets)],
        )  # fmt: skip
        (self.folder / f"{part.name}.rollouts").write_bytes(encode_rollouts(logged))

    def _log_probs(self, batch: RolloutBatch, name: str) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        truth = -1.0 - (batch.response_token_ids % 5) / 4
        noise = NOISE.get(name.partition(" ")[0], 0.0)
        random = np.random.default_rng(abs(hash(name)) % 1000)
        values = truth + noise * random.normal(size=truth.size) + self.shift.get(name, 0.0)
        return values.astype(np.float32)


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engines:
    folder = tmp_path / "files"
    folder.mkdir()
    found = Engines(folder)
    monkeypatch.setattr(Work, "do", lambda work, parts, abandoned: found.do(work, parts, abandoned))
    return found


def certified(engines: Engines, model: Path, given: RolloutBatch | None = None, **fields: object) -> Certificate:
    values: dict[str, object] = {"model": model, "engines": ENGINES, "trainer": "torch.bfloat16", "trainer_options": {}}
    asked = Asked(**(values | {"rollouts": 8, "tokens": 16} | fields))  # type: ignore[arg-type]
    out = engines.folder.parent / "cert.json"
    certificate = Certification(asked, engines.folder, out, lambda line: None, given).run()
    assert read_certificate(out).ended == certificate.ended
    return certificate


def verdicts(certificate: Certificate) -> dict[str, str]:
    return {row.name: row.verdict for row in certificate.rows}


def test_every_condition_has_a_verdict(engines: Engines, model: Path) -> None:
    found = certified(engines, model)
    assert found.ended == "complete"
    assert set(verdicts(found).values()) == {"identical", "rounding"}
    assert {"trainer/vllm.decode", "batch_1", "prefix_cache", "seed", "top_p", "stop", "long"} <= set(verdicts(found))
    assert found.row("seed").verdict == "identical"  # type: ignore[union-attr]
    assert [size.dtype for size in found.row("trainer/vllm.prefill").sizes] == ["bfloat16", "float32"]  # type: ignore[union-attr]
    assert found.parameters > 10_000


def test_only_what_the_asked_rows_need_is_done(engines: Engines, model: Path) -> None:
    found = certified(engines, model, rows=("restart",))
    assert [row.name for row in found.rows] == ["restart"]
    assert [name for name in engines.done if "torch" not in name and "trainer" not in name] == [
        "base", "vllm.decode", "restart",
    ]  # fmt: skip


def test_an_engine_that_dies_in_a_condition_leaves_the_others(engines: Engines, model: Path) -> None:
    engines.problems = {"prefix_cache": "EngineError: the process of vllm was ended by signal 9"}
    found = certified(engines, model)
    assert [row.name for row in found.rows if row.verdict == "not tried"] == ["prefix_cache"]
    assert "signal 9" in found.row("prefix_cache").sentence  # type: ignore[union-attr]


def test_a_model_that_the_engine_refuses_is_said_in_each_row(engines: Engines, model: Path) -> None:
    words = "UnsupportedScoreError: vLLM cannot load the checkpoint: head size 24"
    engines.problems = dict.fromkeys(("base", "temperature", "top_p", "top_k", "stop", "long"), words)
    found = certified(engines, model)
    assert set(verdicts(found).values()) == {"not tried"}
    assert all("head size 24" in row.sentence for row in found.rows)


def test_interrupted_certificate_is_whole(engines: Engines, model: Path) -> None:
    def interrupt(part: Part) -> None:
        if part.name == "restart":
            raise KeyboardInterrupt

    engines.before = interrupt
    found = certified(engines, model)
    assert found.ended == "interrupted"
    left = {row.name: row.sentence for row in found.rows if row.verdict == "not tried"}
    assert left == dict.fromkeys(("restart", "threads", "seed"), "interrupted")


def test_budget_ends_the_rest(engines: Engines, model: Path) -> None:
    found = certified(engines, model, budget=0.0)
    assert found.ended == "the budget of 0 s was spent"
    assert {row.sentence for row in found.rows} == {"the budget of 0 s was spent"}


def test_a_change_is_different_and_is_examined(engines: Engines, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examined: list[tuple[str, str]] = []
    logged: dict[str, float] = {}

    def of(_: Explanations, row: Condition, batch: RolloutBatch, dtype: str, usual: RolloutBatch | None = None) -> Why:
        examined.append((row.name, dtype))
        assert batch.rollout_log_probs is not None
        logged[row.name] = float(np.mean(batch.rollout_log_probs))
        return "x", ("Why.",)

    monkeypatch.setattr(Explanations, "of", of)
    engines.shift = {"prefix_cache": 0.2, "vllm.prefill float32": 1e-3}
    found = certified(engines, model)
    assert {name for name, verdict in verdicts(found).items() if verdict == "different"} == {
        "prefix_cache", "trainer/vllm.prefill", "prefill",
    }  # fmt: skip
    assert ("prefix_cache", "bfloat16") in examined
    assert ("trainer/vllm.prefill", "float32") in examined
    assert found.row("prefix_cache").why == ("Why.",)  # type: ignore[union-attr]
    # The engine's log-probs are those under the condition; of decode and prefill, those of decode, which samples.
    assert logged["prefix_cache"] == pytest.approx(logged["prefill"] + 0.2, abs=1e-3)


def test_tokens_of_another_certificate_are_scored_again(engines: Engines, model: Path) -> None:
    first = certified(engines, model, rows=("prefill",))
    given = given_rollouts(first)
    assert given is not None
    for path in engines.folder.iterdir():
        path.unlink()
    again = certified(engines, model, given, seed=9)
    assert again.row("prefill").rollouts == first.row("prefill").rollouts  # type: ignore[union-attr]
    assert again.row("sampling").rollouts != first.row("prefill").rollouts  # type: ignore[union-attr]
    assert "not tried" not in verdicts(again).values()


def test_unknown_row_is_refused_before_any_work(engines: Engines, model: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no condition prefil; there are trainer/vllm"):
        certified(engines, model, rows=("prefill", "prefil"))
    assert engines.done == []


def test_full_disk_in_the_middle_leaves_a_whole_certificate(engines: Engines, model: Path) -> None:
    def fill(part: Part) -> None:
        if part.name == "restart":
            raise OSError(28, "No space left on device")

    engines.before = fill
    found = certified(engines, model)
    assert found.ended == f"the engines' files cannot be written to {engines.folder.parent} (No space left on device)"
    left = {row.name: row.sentence for row in found.rows if row.verdict == "not tried"}
    assert left == dict.fromkeys(("restart", "threads", "seed"), found.ended)


def test_full_disk_at_the_start_is_said(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: Engines
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("TMPDIR", "/full")
    monkeypatch.setattr(Work, "add", full)
    with pytest.raises(ConfigurationError, match=r"^/full cannot be used .*\(No space left on device\); set TMPDIR"):
        run_command(str(model), "--out", str(tmp_path / "new.json"))


def test_status_is_1_if_nothing_was_tried(
    engines: Engines, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines.problems = {"base": "the engine refuses the model"}
    out = tmp_path / "cert.json"
    assert run_command(str(model), "--out", str(out), "--rows", "restart") == 1
    assert "the engine refuses the model" in capsys.readouterr().out
    assert {row.verdict for row in read_certificate(out).rows} == {"not tried"}


def test_a_context_without_room_is_refused(engines: Engines, model: Path) -> None:
    with pytest.raises(ConfigurationError, match="leaves no room in a context of 128 tokens"):
        certified(engines, model, tokens=127)


def test_prompts_of_a_file(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text(f"[1, 2, 3]\n\n{list(range(20))}\n[4]\n")
    assert prompts_of(model, file, 8, VOCABULARY, 10) == (
        [[1, 2, 3], [4]], "2 prompts of prompts; 1 left out: no tokens, or more than 10",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 99]", "line 1: the model's token ids are 0 to 23"),
        ("[1]\n[2, x]", "line 2: not a JSON list"),
        ("a question", "line 1 is text, and .* has no tokenizer"),
        ("[1, 2, 3, 4, 5, 6]", "no prompt of 1 to 5 tokens"),
    ],
)
def test_unusable_prompts_are_refused(tmp_path: Path, model: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        prompts_of(model, file, 8, VOCABULARY, 5)


def test_long_prompts_have_the_length() -> None:
    found = long_prompts([[1, 2], [3, 4, 5]], 9, 3)
    assert [len(each) for each in found] == [9, 9, 9]
    assert found[0][:5] == [1, 2, 3, 4, 5]
    assert found[1][:5] == [3, 4, 5, 1, 2]


def test_an_adapter_has_a_row_of_its_own(engines: Engines, model: Path) -> None:
    adapter = save_adapter(model.parent / "adapter", model)
    found = certified(engines, adapter, rows=("lora", "prefill"))
    assert "merged float32" in engines.done
    assert [size.dtype for size in found.row("lora").sizes] == ["float32"]  # type: ignore[union-attr]
    assert (engines.folder / "merged" / "config.json").is_file()


def run_command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    certify.configure(parser)
    return certify.run(parser.parse_args(words))


def test_a_certificate_of_another_model_is_refused_before_any_work(
    engines: Engines, model: Path, tmp_path: Path
) -> None:
    certified(engines, model, rows=("prefill",))
    other = save_checkpoint(tmp_path / "other", seed=5)
    before = len(engines.done)
    with pytest.raises(ConfigurationError, match="of other weights: m "):
        run_command(str(other), "--out", str(tmp_path / "new.json"), "--against", str(tmp_path / "cert.json"))
    assert len(engines.done) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["MODEL", "--engine", "vllm.decod"], "did you mean 'vllm.decode'"),
        (["MODEL", "--trainer", "vllm.prefill"], "is a scorer of an engine"),
        (["MODEL", "--trainer", "torch.trainer:autocast"], "options must be OPTION=VALUE"),
        (["MODEL", "--out", "/nowhere/cert.json"], "cannot be written"),
        (["MODEL", "more"], "give one MODEL, `show`"),
        (["show"], "certify show needs FILE, a certificate"),
        (["bisect"], "certify bisect needs MODEL, a folder"),
    ],
)
def test_bad_arguments_are_refused(model: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run_command(*[str(model) if word == "MODEL" else word for word in words])
