"""Tests of the entry point: commands, missing extras, errors and exit status."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import foreshock
from foreshock.commands.main import main
from foreshock.installing import install_command
from tests.foreshock.client.faulty_service import faulty_service
from tests.paths import RECORDED
from tests.ports import free_port


def test_help_lists_every_command_and_each_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("serve", "keys", "worker", "import", "runs", "watch", "report", "probe")
    shown = []
    for words in ([], *([name] for name in names)):
        with pytest.raises(SystemExit) as ended:
            main([*words, "--help"])
        assert ended.value.code == 0
        shown.append(capsys.readouterr().out)
    for name, own in zip(names, shown[1:], strict=True):
        assert f"\n    {name} " in shown[0]
        assert f"usage: foreshock {name}" in own


def test_version_imports_no_command() -> None:
    code = """
import sys
from foreshock.commands.main import main
try:
    main(["--version"])
except SystemExit:
    print([name for name in ("numpy", "pyarrow") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == f"foreshock {foreshock.__version__}\n[]\n"


def test_output_that_the_locale_cannot_show_is_replaced() -> None:
    code = """
from foreshock.commands.main import main
try:
    main(["--version"])
except SystemExit:
    print("π is 1.0 × μ")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=120
    )
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, [b"? is 1.0 ? ?"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_full_disk_is_one_line() -> None:
    code = "import sys; from foreshock.commands.main import main; raise SystemExit(main(['selfcheck', *sys.argv[1:]]))"
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-c", code, str(RECORDED / "rollouts" / "step_0001.parquet")]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "foreshock: error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("words", [[], ["unknown"], ["report", "--unknown"], ["probe", "run"]])
def test_invalid_arguments_exit_with_status_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


LARGE = "99999999999999999999999"


OUT_OF_RANGE: list[tuple[list[str], str]] = [
    (["runs", "--limit", "-1"], "--limit: must be a whole number from 1 to 2147483647, got -1"),
    (["runs", "--limit", LARGE], "--limit: must be a whole number from 1"),
    (["watch", "--interval", "-1"], "--interval: must be a number above 0 to 1e+08, got -1"),
    (["watch", "--interval", "nan"], "--interval: must be a number"),
    (["watch", "--interval", "0"], "--interval: must be a number"),
    (["watch", "--from-step", "-1"], "--from-step: must be a whole number from 0"),
    (["report", "--step", LARGE], "--step: must be a whole number from 0"),
    (["selfcheck", "x.parquet", "--step", "-5"], "--step: must be a whole number from 0"),
    (["import", "x", "--run-key", "r", "--step", "-1"], "--step: must be a whole number from 0"),
    (["import", "x", "--run-key", "r", "--step", LARGE], "--step: must be a whole number from 0"),
    (["import", "x", "--run-key", "r", "--length-cap", "0"], "--length-cap: must be a whole number from 1"),
    (["import", "x", "--run-key", "r", "--initial-learning-rate", "0"], "--initial-learning-rate: must be a number"),
    (["import", "x", "--run-key", "r", "--settle", "-1"], "--settle: must be a number from 0"),
    (["import", "x", "--run-key", "r", "--until-idle", "inf"], "--until-idle: must be a number from 0"),
    (["import", "x", "--run-key", " "], "--run-key: must not be empty"),
    (["backtest", "x", "--reward-floor", "nan"], "--reward-floor: must be a number"),
    (["probe", "r", LARGE], "STEP: must be a whole number from 0"),
    (["probe", "r", "1", "--max-rollouts", "0"], "--max-rollouts: must be a whole number from 1"),
    (["probe", "r", "1", "--timeout", "nan"], "--timeout: must be a number from 0"),
    (["remeasure", "r", "--step", LARGE], "--step: must be a whole number from 0"),
    (["remeasure", "r", "--attempt", "0"], "--attempt: must be a whole number from 1"),
    (["keys", "create", ""], "name: must not be empty"),
    (["keys", "create", "a", "--expires", "0"], "--expires: must be a number above 0"),
    (["keys", "rotate", "a", "--overlap", "-1"], "--overlap: must be a number from 0"),
    (["worker", "--until-idle", "-1"], "--until-idle: must be a number from 0"),
    (["worker", "--workers", "0"], "--workers: must be a whole number from 1"),
    (["worker", "--gpus-per-worker", "nan"], "--gpus-per-worker: must be a number from 0"),
    (["doctor", "x", "--threads", "-1"], "--threads: must be a whole number from 0 to 4096"),
    (["doctor", "x", "--rollouts", "0"], "--rollouts: must be a whole number from 1"),
    (["doctor", "x", "--budget", "0s"], "--budget: must be a number above 0"),
    (["doctor", "x", "--budget", "9" * 400], "--budget: must be a number above 0"),
]


def test_value_out_of_range_is_refused_with_the_name_of_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in OUT_OF_RANGE:
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        shown = capsys.readouterr().err
        assert message in shown
        assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("vllm.decod", "unknown scorer 'vllm.decod', did you mean 'vllm.decode'?; scorers: "),
        ("foo", "unknown scorer 'foo'; scorers: "),
        ("vllm.decode:dtype", "options must be OPTION=VALUE, got 'dtype'"),
    ],
)
def test_unknown_scorer_is_refused_before_search(asked: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["doctor", "no-such-file", "--engine-weights", "none", "--engine", "torch.float32", asked]) == 1
    assert f"error: --engine: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "suggested"),
    [(["reprot"], "report"), (["report", "run", "--stpe", "3"], "--step"), (["keys", "craete"], "create")],
)
def test_misspelling_gets_a_suggestion(words: list[str], suggested: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert f"did you mean {suggested!r}?" in capsys.readouterr().err


def without(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `foreshock words` in a Python without `module`."""
    program = f"import sys; sys.modules[{module!r}] = None; from foreshock.commands.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.parametrize(
    ("module", "command", "extra"),
    [("uvicorn", "serve", "service"), ("sqlalchemy", "keys", "service"), ("pydantic_settings", "worker", "probes")],
)
def test_missing_extra_is_named(module: str, command: str, extra: str) -> None:
    words = [command, "list"] if command == "keys" else [command]
    ended = without(module, *words)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.endswith(f"{install_command(extra)}\n")


def test_help_lists_commands_with_missing_extras() -> None:
    ended = without("pydantic_settings", "--help")
    assert ended.returncode == 0
    assert "report" in ended.stdout
    assert install_command("probes").split()[-1] in ended.stdout


@pytest.mark.parametrize("command", [["runs"], ["report"], ["watch", "--once"], ["probe", "r", "1"]])
def test_service_that_is_down_is_one_line(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--url", f"http://127.0.0.1:{free_port()}"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("foreshock: error: no answer from http://127.0.0.1:")
    assert shown.endswith("check that the service runs, and FORESHOCK_URL\n")
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (500, "500 injected 500"),
        (403, "error: injected 403; check FORESHOCK_API_KEY or --api-key"),
        ("html", "is not a Foreshock service; check FORESHOCK_URL"),
    ],
)
def test_answer_that_is_an_error_is_one_line(fault: int | str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with faulty_service(always=fault) as service:
        assert main(["runs", "--url", service.url]) == 1
    shown = capsys.readouterr().err
    assert words in shown
    assert shown.count("\n") == 1


def test_closed_pipe_is_no_error() -> None:
    program = f"{sys.executable} -m foreshock.commands.main --help | head -c 1"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", program], capture_output=True, text=True, check=False)
    assert "Traceback" not in ended.stderr
