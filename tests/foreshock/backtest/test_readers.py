"""Tests of the reader of TensorBoard event files, against files that TensorBoard and torch write."""

from pathlib import Path

import numpy as np
import pytest

from foreshock.backtest.readers import UnreadableRun, event_files, read_run, scalars_of
from foreshock.diagnosis.detectors import ClosedStep
from foreshock.diagnosis.quantities import LENGTH_KEY, REWARD_KEY

ROWS = [(1, 100.0, 0.5), (2, 110.0, 0.25), (300, 120.0, -0.125)]
STEPS = [ClosedStep(step, {LENGTH_KEY: length, REWARD_KEY: reward}) for step, length, reward in ROWS]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder with the event file of a run, as TensorBoard 2 writes it."""
    summary = pytest.importorskip("tensorboard.summary")
    writer = summary.Writer(str(tmp_path / "run"))
    for step, length, reward in ROWS:
        writer.add_scalar("response_length/mean", length, step=step)
        writer.add_scalar("train/reward", reward, step=step)
    writer.close()
    return tmp_path / "run"


def test_folder_and_file_of_tensorboard_give_the_steps(written: Path) -> None:
    (file,) = event_files(written)
    assert read_run(written) == read_run(file) == STEPS


def test_file_of_torch_gives_the_steps(tmp_path: Path) -> None:
    torch_writer = pytest.importorskip("torch.utils.tensorboard")
    writer = torch_writer.SummaryWriter(str(tmp_path))
    for step, length, reward in ROWS:
        writer.add_scalar("response_length/mean", length, step)
        writer.add_scalar("critic/rewards/mean", reward, step)
        writer.add_histogram("weights", np.array([1.0, 2.0]), step)
    writer.close()
    assert read_run(tmp_path) == STEPS


def test_cut_file_gives_what_came_before_the_cut(written: Path) -> None:
    (file,) = event_files(written)
    whole = file.read_bytes()
    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        found = list(scalars_of(file))
        assert len(found) <= 2 * len(ROWS)
    file.write_bytes(whole[:-3])
    assert read_run(written)[:2] == STEPS[:2]


def test_broken_records_are_skipped(written: Path) -> None:
    (file,) = event_files(written)
    whole = bytearray(file.read_bytes())
    for place in range(0, len(whole), 7):
        broken = whole.copy()
        broken[place] ^= 0xFF
        file.write_bytes(broken)
        list(scalars_of(file))


def test_folder_without_event_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableRun, match="without TensorBoard event files"):
        read_run(tmp_path)
