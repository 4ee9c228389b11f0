"""SGLang's scorers on answers that no healthy server gives; `test_sglang_server.py` runs a real one."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from foreshock.rollouts import RolloutBatch
from foreshock_probes.routing import sglang_routes
from foreshock_probes.scorers.request import ScoreRequest, UnsupportedScoreError, WarmModel
from tests.probes.scorers.test_torch_forward import score
from tests.probes.tiny import VOCABULARY

ROLLOUTS = RolloutBatch.from_lists(["a", "b"], [[3, 4], [5]], [[6, 7], [8]])


class Answers:
    """Answers in the documented format; each is a list [log-prob, token id, text]."""

    def __init__(self, folder: Path) -> None:
        self.model: dict[str, Any] = {"model_path": str(folder), "is_generation": True, "weight_version": "default"}
        self.entries: list[list[list[Any]]] = [
            [[None, 4, None], [-0.5, 6, None], [-0.25, 7, None]],
            [[None, 5, None], [-2.0, 8, None]],
        ]
        self.arguments: dict[str, Any] = {"version": "0.5.9", "tp_size": 2}
        self.paths = ("/model_info", "/server_info")
        self.received: dict[str, Any] = {}
        self.dies = False


@pytest.fixture
def answers(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    """Answers that are served at the address of the settings."""
    chosen = Answers(checkpoints / "first")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(dict(zip(chosen.paths, (chosen.model, chosen.arguments), strict=True)).get(self.path))

        def do_POST(self) -> None:
            chosen.received = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if chosen.dies:
                self.close_connection = True
                return
            self._answer([{"text": "", "meta_info": {"input_token_logprobs": each}} for each in chosen.entries])

        def _answer(self, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(200 if body is not None else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("FORESHOCK_ENGINE_SERVERS", f"sglang=http://127.0.0.1:{server.server_port}")
    yield chosen
    server.shutdown()
    thread.join()
    server.server_close()


def test_log_probs_are_read_at_the_responses_tokens(answers: Answers, checkpoints: Path) -> None:
    scored = score(checkpoints / "first", ROLLOUTS, "sglang.http")
    assert scored.log_probs.tolist() == [-0.5, -0.25, -2.0]
    assert answers.received["input_ids"] == [[3, 4, 6, 7], [5, 8]]
    assert answers.received["logprob_start_len"] == [1, 0]
    assert scored.fingerprint.engine_version == "0.5.9"
    assert (scored.fingerprint.flags["tp_size"], scored.fingerprint.flags["weights_seen_by"]) == ("2", "folder")


def test_older_servers_have_other_paths(answers: Answers, checkpoints: Path) -> None:
    answers.paths = ("/get_model_info", "/get_server_info")
    assert score(checkpoints / "first", ROLLOUTS, "sglang.http").fingerprint.engine_version == "0.5.9"


def test_last_id_of_the_vocabulary_is_reported_as_0(answers: Answers, checkpoints: Path) -> None:
    rollouts = RolloutBatch.from_lists(["a", "b"], [[3, 4], [5]], [[6, VOCABULARY - 1], [8]])
    answers.entries[0][2][1] = 0
    assert score(checkpoints / "first", rollouts, "sglang.http").log_probs.tolist() == [-0.5, -0.25, -2.0]
    rollouts = RolloutBatch.from_lists(["a", "b"], [[3, 4], [5]], [[6, 7], [8]])
    with pytest.raises(UnsupportedScoreError, match="other tokens"):
        score(checkpoints / "first", rollouts, "sglang.http")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda answers: answers.entries[0][2].__setitem__(0, None), r"no number for 1 of 2 log-probs .*\(NaN\)"),
        (lambda answers: answers.entries[0][2].__setitem__(1, 9), "other tokens"),
        (lambda answers: answers.model.pop("model_path"), "has no 'model_path'"),
    ],
)
def test_wrong_answer_is_refused(
    answers: Answers, checkpoints: Path, change: Callable[[Answers], object], words: str
) -> None:
    change(answers)
    with pytest.raises(UnsupportedScoreError, match=words):
        score(checkpoints / "first", ROLLOUTS, "sglang.http")


def test_dtype_of_the_fingerprint_is_the_one_that_the_server_computes_in(answers: Answers, checkpoints: Path) -> None:
    """The checkpoint is in float32, which SGLang serves in float16 unless it is told a dtype."""
    answers.arguments["dtype"] = "auto"
    assert score(checkpoints / "first", ROLLOUTS, "sglang.http").fingerprint.dtype == "float16"
    answers.arguments["dtype"] = "bfloat16"
    assert score(checkpoints / "first", ROLLOUTS, "sglang.http").fingerprint.dtype == "bfloat16"


def test_decode_needs_a_server_that_forces_tokens(answers: Answers, checkpoints: Path) -> None:
    with pytest.raises(UnsupportedScoreError, match="start it with --enable-custom-logit-processor"):
        score(checkpoints / "first", ROLLOUTS, "sglang.decode")
    answers.arguments["enable_custom_logit_processor"] = True
    with pytest.raises(UnsupportedScoreError, match="'output_ids'"):
        score(checkpoints / "first", ROLLOUTS, "sglang.decode")


def test_routes_need_a_server_that_returns_them(answers: Answers, checkpoints: Path) -> None:
    request = ScoreRequest("sglang.http", "", ROLLOUTS, checkpoints / "first", "sha256:" + 64 * "0")
    with pytest.raises(UnsupportedScoreError, match="--enable-return-routed-experts"):
        sglang_routes.record(request, WarmModel(), lambda _: None)


def test_a_server_that_dies_in_the_middle_may_be_asked_again(answers: Answers, checkpoints: Path) -> None:
    answers.dies = True
    with pytest.raises(ConnectionError, match=r"gives no answer \(RemoteProtocolError.*start it, or correct"):
        score(checkpoints / "first", ROLLOUTS, "sglang.http")
    answers.dies = False
    assert score(checkpoints / "first", ROLLOUTS, "sglang.http").log_probs.tolist() == [-0.5, -0.25, -2.0]


def test_ids_of_another_tokenizer_are_refused_before_the_server_is_asked(answers: Answers, checkpoints: Path) -> None:
    rollouts = RolloutBatch.from_lists(["a"], [[3]], [[VOCABULARY]])
    with pytest.raises(UnsupportedScoreError, match=f"has the token id {VOCABULARY}.*did not sample these rollouts"):
        score(checkpoints / "first", rollouts, "sglang.http")
    assert not answers.received


def test_weights_version_of_the_server_is_compared_with_the_checkpoints(answers: Answers, checkpoints: Path) -> None:
    answers.model |= {"model_path": "hub/name", "weight_version": "7"}
    scored = score(checkpoints / "first", ROLLOUTS, "sglang.http")
    assert scored.fingerprint.flags["weights_seen_by"] == "version"
    answers.model["weight_version"] = "6"
    with pytest.raises(UnsupportedScoreError, match="holds the weights version 6, the checkpoint has 7"):
        score(checkpoints / "first", ROLLOUTS, "sglang.http")


def test_worker_without_a_server_says_which_setting_names_one(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORESHOCK_ENGINE_SERVERS", raising=False)
    with pytest.raises(UnsupportedScoreError, match="FORESHOCK_ENGINE_SERVERS='sglang="):
        score(checkpoints / "first", ROLLOUTS, "sglang.http")
