"""The tree of errors: its drawing, its page, what the connection raises."""

import inspect
import pickle
import re
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from foreshock import errors
from foreshock.client.connection import ServiceConnection
from foreshock.errors import ForeshockError, Rejected, ServiceError, ServiceUnavailable, Unauthorized, WrongService
from tests.foreshock.client.faulty_service import faulty_service
from tests.paths import DOCS
from tests.ports import free_port

_API_PAGE = (DOCS / "api.md").read_text()
ERRORS = _API_PAGE[_API_PAGE.index("## Handle errors") : _API_PAGE.index("## Types of problems")]


def drawn_tree() -> dict[str, str | None]:
    """Return each class in the drawing of the module docstring, with its parent in the drawing."""
    parents: dict[str, str | None] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^([ │├└─]*)([A-Z]\w+)(  |$)", line)
        if found is None:
            continue
        indent = len(found[1])
        above = [item for item in above if item[0] < indent]
        parents[found[2]] = above[-1][1] if above else None
        above.append((indent, found[2]))
    return parents


def real_tree() -> dict[str, str | None]:
    classes = [item for _, item in inspect.getmembers(errors, inspect.isclass) if issubclass(item, ForeshockError)]
    return {item.__name__: item.__bases__[0].__name__ if item is not ForeshockError else None for item in classes}


def test_drawing_is_the_class_tree() -> None:
    assert drawn_tree() == real_tree()
    assert sorted(errors.__all__) == sorted(real_tree())


def test_page_lists_every_error_once_in_the_order_of_the_drawing() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", ERRORS, re.MULTILINE)
    assert rows == list(drawn_tree())


def test_example_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", ERRORS, re.DOTALL)
    monkeypatch.setenv("FORESHOCK_SPOOL_DIRECTORY", str(tmp_path))
    exec(code.replace("http://127.0.0.1:8765", f"http://127.0.0.1:{free_port()}"), {})
    assert capsys.readouterr().out.startswith("logprobs unknown column; columns: sample_id, ")


@pytest.mark.parametrize(
    ("status", "expected"),
    [(400, Rejected), (404, Rejected), (405, Rejected), (409, Rejected), (410, Rejected), (413, Rejected),
     (422, Rejected), (401, Unauthorized), (403, Unauthorized), (408, ServiceUnavailable), (425, ServiceUnavailable),
     (429, ServiceUnavailable), (500, ServiceUnavailable), (503, ServiceUnavailable), ("reset", ServiceUnavailable),
     ("half", ServiceUnavailable), ("html", WrongService), (302, WrongService)],
)  # fmt: skip
def test_connection_raises_the_error_of_the_answer(status: int | str, expected: type[ServiceError]) -> None:
    with faulty_service(always=status) as service, ServiceConnection(service.url) as connection:
        with pytest.raises(ServiceError) as raised:
            connection.get_json("/v1/runs/some")
        assert type(raised.value) is expected
        assert raised.value.status == (status if isinstance(status, int) else None)


@pytest.mark.parametrize("status", [404, 405])
@pytest.mark.parametrize("path", ["/v1/runs", "/livez"])
def test_service_without_the_paths_of_every_service_is_another(status: int, path: str) -> None:
    with (
        faulty_service(always=status) as service,
        ServiceConnection(f"{service.url}/v1") as connection,
        pytest.raises(WrongService, match="/v1 is not a Foreshock service; check FORESHOCK_URL"),
    ):
        connection.get_json(path)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("17", 17.0), ("0", 0.0), ("soon", None), ("", None), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("a date", 90.0)],
)
def test_retry_after_is_read(header: str, seconds: float | None) -> None:
    if header == "a date":
        header = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    with faulty_service(always=503, retry_after=header) as service, ServiceConnection(service.url) as connection:
        with pytest.raises(ServiceUnavailable) as raised:
            connection.get_json("/v1/runs")
        assert raised.value.retry_after_seconds == (pytest.approx(90, abs=30) if seconds == 90.0 else seconds)


def test_error_names_row_and_column() -> None:
    error = errors.InvalidRolloutsError("is negative: ids start at 0", row=3, column="turn")
    assert str(error) == "row 3, column `turn`: is negative: ids start at 0"
    assert (error.row, error.column, error.message) == (3, "turn", "is negative: ids start at 0")


def test_fault_has_no_advice_for_the_sender() -> None:
    error = errors.LimitExceededError("9 rollouts are more than 8", column="sample_id", advice="send more shards")
    assert str(error) == "column `sample_id`: 9 rollouts are more than 8: send more shards"
    assert error.message == "9 rollouts are more than 8: send more shards"
    assert error.fault == "column `sample_id`: 9 rollouts are more than 8"


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRolloutsError("wrong", row=1, column="reward"),
        errors.LimitExceededError("too many", advice="send fewer"),
        errors.LimitExceededError("too many", column="sample_id"),
        errors.ServiceError("no", status=409, problem={"title": "conflict"}),
        errors.WeightsError("gone"),
    ],
)
def test_errors_survive_pickle(error: errors.ForeshockError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("stpe", "step"), ("STEP", "step"), ("comparision", "comparison"), ("trainer/rollot", "trainer/rollout")],
)
def test_most_similar_name_is_suggested(given: str, expected: str) -> None:
    known = ["step", "steps_total", "comparison", "trainer/rollout"]
    assert errors.did_you_mean(given, known) == f", did you mean {expected!r}?"


def test_nothing_is_suggested_for_an_unlike_name() -> None:
    assert errors.did_you_mean("zzz", ["step", "comparison"]) == errors.did_you_mean("step", []) == ""
