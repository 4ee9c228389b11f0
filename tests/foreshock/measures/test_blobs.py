"""Statistics as bytes: round trips, and refusal of damage, of other kinds and of other versions."""

import json
import random
import zlib

import numpy as np
import pyarrow as pa
import pytest

from foreshock.errors import StatisticsError
from foreshock.measures import ComparisonStatistics, RolloutSummaries, StepStatistics, measure_step
from foreshock.measures.statistics import blob
from foreshock.measures.statistics.blob import pack
from tests.foreshock.batches import random_batch

MEASUREMENT = measure_step(random_batch(0, largest=30.0))
COMPARISON = MEASUREMENT.comparisons["trainer/rollout"]


def same(one: dict[str, float], two: dict[str, float]) -> bool:
    return np.array_equal(list(one.values()), list(two.values()), equal_nan=True) and one.keys() == two.keys()


def test_statistics_survive_as_bytes() -> None:
    for statistics in (COMPARISON.statistics, MEASUREMENT.step):
        again = type(statistics).from_bytes(statistics.to_bytes())
        assert again.to_bytes() == statistics.to_bytes()
        assert same(again.measures(), statistics.measures())
    again = ComparisonStatistics.from_bytes(COMPARISON.statistics.to_bytes())
    assert again.merge(again).tokens == 2 * COMPARISON.statistics.tokens
    assert again.buckets().columns() == COMPARISON.statistics.buckets().columns()


def test_blob_is_small() -> None:
    assert len(COMPARISON.statistics.to_bytes()) < 16_000
    large = measure_step(random_batch(0, 400, 400)).comparisons["trainer/rollout"]
    # Mostly the 512 token ids, the largest values and the sums on a grid, which do not grow further.
    assert len(large.statistics.to_bytes()) < 80_000
    assert len(MEASUREMENT.step.to_bytes()) < 2_000


def test_damaged_bytes_are_rejected() -> None:
    generator = random.Random(0)
    for reader, data in (
        (ComparisonStatistics, COMPARISON.statistics.to_bytes()),
        (StepStatistics, MEASUREMENT.step.to_bytes()),
    ):
        for _ in range(400):
            damaged = bytearray(data)
            position = generator.randrange(len(damaged))
            damaged[position] ^= 1 << generator.randrange(8)
            try:
                again = reader.from_bytes(bytes(damaged))
            except StatisticsError:
                continue
            # A flipped bit may decompress to the same bytes.
            assert again.to_bytes() == data
        for length in range(0, len(data), 97):
            with pytest.raises(StatisticsError):
                reader.from_bytes(data[:length])


def test_statistics_of_another_kind_are_rejected() -> None:
    with pytest.raises(StatisticsError, match="must hold 'comparison', got 'step'"):
        ComparisonStatistics.from_bytes(MEASUREMENT.step.to_bytes())
    with pytest.raises(StatisticsError, match="not a blob"):
        StepStatistics.from_bytes(b"pickle?")


def test_statistics_of_another_version_are_rejected_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    data = COMPARISON.statistics.to_bytes()
    written = blob.STATISTICS_VERSION
    monkeypatch.setattr(blob, "STATISTICS_VERSION", written + 1)
    with pytest.raises(StatisticsError, match=rf"version {written + 1}, got {written}.*remeasure"):
        ComparisonStatistics.from_bytes(data)


def test_header_cannot_ask_for_more_memory_than_its_arrays() -> None:
    layout = {"values": ("<f8", (None,))}
    data = blob.pack("test", {"values": np.zeros(10)})
    assert blob.unpack("test", data, layout)["values"].tolist() == [0.0] * 10
    for size in ("1000000000000", "9", "-1", "1.5", "true", '"a"'):
        with pytest.raises(StatisticsError):
            blob.unpack("test", _with_size(data, size), layout)
    bomb = _with_size(blob.pack("test", {"values": np.zeros(10_000_000)}), "10")
    with pytest.raises(StatisticsError, match="its size differs from its header"):
        blob.unpack("test", bomb, layout)


def _with_size(data: bytes, size: str) -> bytes:
    length = int.from_bytes(data[4:8], "little")
    header = data[8 : 8 + length]
    begin, end = header.index(b'"<f8",[') + 7, header.index(b"]]")
    header = header[:begin] + size.encode() + header[end:]
    return data[:4] + len(header).to_bytes(4, "little") + header + data[8 + length :]


def test_summaries_survive_as_bytes_and_reject_other_versions() -> None:
    data = COMPARISON.summaries.to_bytes()
    assert RolloutSummaries.from_bytes(data).table.equals(COMPARISON.summaries.table)
    with pytest.raises(StatisticsError, match="damaged"):
        RolloutSummaries.from_bytes(b"ARROW1")
    for metadata, message in (({"statistics_version": "1"}, "got '1'"), ({}, "got 'none'")):
        sink = pa.BufferOutputStream()
        table = COMPARISON.summaries.table.replace_schema_metadata(metadata)
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(StatisticsError, match=message):
            RolloutSummaries.from_bytes(bytes(sink.getvalue()))


@pytest.mark.parametrize("dtype", ["<f8", "<i8", "<u8", "<i4", "<f4", ">f8"])
def test_header_names_the_stored_type_of_an_array(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    blob = pack("test", {"array": array})
    little = dtype.replace(">", "<")
    end = 8 + int.from_bytes(blob[4:8], "little")
    assert json.loads(blob[8:end])["arrays"] == {"array": [little, [2, 3]]}
    assert zlib.decompress(blob[end:]) == array.astype(little).tobytes()
