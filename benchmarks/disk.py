"""How many bytes does a stored token take? `make bench-disk`.

A fixed sample: token ids of a byte-level BPE tokenizer of 32,768 tokens, trained here on the sources of Python's
standard library, and two log-probs of each token that nothing has rounded. The model is a small recurrent one in torch:
its hidden state is the embedding of the last token and a decaying mean of the earlier ones, so that no two tokens have
the same log-prob; its weights are the leading singular vectors of the corpus's association matrix and the frequencies
of the tokens, held in bfloat16. The rollout log-probs are of a bfloat16 forward pass, head included, with the
log-softmax in float32; the trainer's are of the same weights with a float32 head. The rollouts are pieces from random
places of files that neither tokenizer nor model was fitted to.

The file is the one that the service stores: `encode_rollouts`. Printed are the bytes per response token of every
column, as its pages lie in the file, and the same for other encodings that any Parquet reader reads, which say what
there is to gain.

Bar: token ids and two log-probs take at most 8.5 bytes per response token together, and the columns are read back as
plain lists of int32 and float32 by pyarrow.
"""

from __future__ import annotations

import io
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from foreshock.rollouts import RolloutBatch, decode_rollouts, encode_rollouts

BAR_BYTES = 8.5
VOCABULARY, RANK, SEED = 32_768, 48, 7
DECAY, EARLIER = 0.9, 0.5
ROLLOUTS, TOKENS, PROMPT_TOKENS = 64, 512, 32
_POWER_ITERATIONS = 3
_AT_ONCE = 2_048
_COUNTED = ("response_token_ids", "rollout_log_probs", "trainer_log_probs")

Ids = NDArray[np.int32]


def main() -> None:
    """Build the sample, print the bytes of each column and of other encodings, and check the bar."""
    torch.manual_seed(SEED)
    batch = make_sample()
    body = encode_rollouts(batch)
    again = decode_rollouts(body)
    for name in _COUNTED:
        assert np.array_equal(getattr(again, name), getattr(batch, name)), f"{name} was not read back as it was written"
    table = pq.read_table(io.BytesIO(body), columns=list(_COUNTED))
    assert [str(column.type.value_type) for column in table.columns] == ["int32", "float", "float"]
    sizes = bytes_of_columns(body)
    print(f"{batch.num_rollouts} rollouts of {batch.num_tokens:,} response tokens, {len(body):,} bytes")
    print(f"\n{'column':<22}{'bytes per response token':>26}")
    for name, size in sizes.items():
        print(f"{name:<22}{size / batch.num_tokens:>26.3f}")
    found = sum(sizes[name] for name in _COUNTED) / batch.num_tokens
    print(f"\n{'other encodings':<44}{'ids':>8}{'rollout':>10}{'trainer':>10}{'sum':>8}")
    for label, options in other_encodings().items():
        other = bytes_of_columns(written(table, options))
        parts = [other[name] / batch.num_tokens for name in _COUNTED]
        print(f"{label:<44}{parts[0]:>8.3f}{parts[1]:>10.3f}{parts[2]:>10.3f}{sum(parts):>8.3f}")
    print(f"\nbytes_per_token={found:.3f} bar={BAR_BYTES} file_bytes_per_token={len(body) / batch.num_tokens:.3f}")
    sys.exit(0 if found <= BAR_BYTES else 1)


def make_sample() -> RolloutBatch:
    """Return the fixed sample."""
    files = sorted(path for path in Path(sysconfig.get_paths()["stdlib"]).rglob("*.py") if _is_source(path))
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    fitted = [text for number, text in enumerate(texts) if number % 8]
    held_out = [text for number, text in enumerate(texts) if not number % 8]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(fitted, trainer)
    corpus = _ids(tokenizer, fitted)
    others = _ids(tokenizer, held_out)
    length = PROMPT_TOKENS + TOKENS
    starts = np.random.default_rng(SEED).choice(others.size // length, ROLLOUTS, replace=False) * length
    rows = np.stack([others[start : start + length] for start in starts])
    embedding, head, bias = fit_bigrams(corpus)
    targets = rows[:, PROMPT_TOKENS:].ravel()
    hidden = hidden_states(embedding.bfloat16(), rows)[:, PROMPT_TOKENS - 1 : -1].flatten(0, 1)
    return RolloutBatch(
        sample_ids=[f"{row:05d}" for row in range(ROLLOUTS)],
        prompt_token_ids=np.ascontiguousarray(rows[:, :PROMPT_TOKENS]).ravel(),
        prompt_offsets=np.arange(ROLLOUTS + 1) * PROMPT_TOKENS,
        response_token_ids=targets.copy(),
        response_offsets=np.arange(ROLLOUTS + 1) * TOKENS,
        rollout_log_probs=log_probs(hidden, head.bfloat16(), bias.bfloat16(), targets),
        trainer_log_probs=log_probs(hidden.float(), head.bfloat16().float(), bias.bfloat16().float(), targets),
    )


def fit_bigrams(corpus: Ids) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return embedding [V, R], head [V, R] and bias [V]: positive pointwise mutual information of rank R, log counts.

    The singular vectors are those of randomized subspace iteration (Halko, Martinsson and Tropp, 2011).
    """
    counts = np.bincount(corpus, minlength=VOCABULARY) + 0.5
    pairs, times = np.unique(corpus[:-1].astype(np.int64) * VOCABULARY + corpus[1:], return_counts=True)
    first, second = pairs // VOCABULARY, pairs % VOCABULARY
    information = np.maximum(np.log(times * corpus.size / (counts[first] * counts[second])), 0.0)
    places = torch.from_numpy(np.stack([first, second]))
    values = torch.from_numpy(information.astype(np.float32))
    matrix = torch.sparse_coo_tensor(places, values, (VOCABULARY, VOCABULARY), check_invariants=False)
    matrix = matrix.coalesce()
    basis = torch.randn(VOCABULARY, RANK)
    for _ in range(_POWER_ITERATIONS):
        basis, _ = torch.linalg.qr(torch.sparse.mm(matrix.t(), torch.sparse.mm(matrix, basis)))
    return torch.sparse.mm(matrix, basis), basis, torch.from_numpy(np.log(counts / counts.sum()).astype(np.float32))


def hidden_states(embedding: torch.Tensor, rows: Ids) -> torch.Tensor:
    """Return the hidden states [N, L, R] of token ids [N, L]."""
    tokens = embedding[torch.from_numpy(rows.astype(np.int64))]
    mean, states = torch.zeros_like(tokens[:, 0]), []
    for position in range(rows.shape[1]):
        states.append(tokens[:, position] + EARLIER * mean)
        mean = DECAY * mean + (1 - DECAY) * tokens[:, position]
    return torch.stack(states, dim=1)


@torch.no_grad()
def log_probs(hidden: torch.Tensor, head: torch.Tensor, bias: torch.Tensor, targets: Ids) -> NDArray[np.float32]:
    """Return the log-softmax in float32 of `hidden` [T, R] × `head` [V, R] + `bias` [V] at the targets [T]."""
    found = []
    for start in range(0, len(targets), _AT_ONCE):
        logits = (hidden[start : start + _AT_ONCE] @ head.t() + bias).float()
        chosen = torch.from_numpy(targets[start : start + _AT_ONCE].astype(np.int64)).unsqueeze(1)
        found.append((logits.gather(1, chosen) - logits.logsumexp(1, keepdim=True)).squeeze(1))
    values: NDArray[np.float32] = torch.cat(found).numpy()
    return values


def bytes_of_columns(body: bytes) -> dict[str, int]:
    """Return the compressed bytes of each column."""
    metadata = pq.read_metadata(io.BytesIO(body))
    sizes: dict[str, int] = {}
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(number)
            name = chunk.path_in_schema.split(".")[0]
            sizes[name] = sizes.get(name, 0) + chunk.total_compressed_size
    return sizes


def other_encodings() -> dict[str, dict[str, Any]]:
    """Return options of `pyarrow.parquet.write_table`, by what they are."""
    ids, floats = "response_token_ids.list.element", [f"{name}.list.element" for name in _COUNTED[1:]]
    split = {"use_dictionary": False, "use_byte_stream_split": floats}
    encoded = dict.fromkeys(floats, "BYTE_STREAM_SPLIT")
    return {
        "as stored: split floats, plain ids": split,
        "level 9": split | {"compression_level": 9},
        "level 19": split | {"compression_level": 19},
        "floats not split": {"use_dictionary": False},
        "ids as a dictionary": split | {"use_dictionary": [ids]},
        "ids split": split | {"use_byte_stream_split": [ids, *floats]},
        "ids split, level 9": split | {"use_byte_stream_split": [ids, *floats], "compression_level": 9},
        "ids as differences": {"use_dictionary": False, "column_encoding": encoded | {ids: "DELTA_BINARY_PACKED"}},
    }


def written(table: pa.Table, options: dict[str, Any]) -> bytes:
    """Return the table as a file with these options, otherwise as the service writes it."""
    sink = io.BytesIO()
    base = {"row_group_size": 64, "compression": "zstd", "write_statistics": False, "write_page_checksum": True}
    pq.write_table(table, sink, **(base | options))
    return sink.getvalue()


def _is_source(path: Path) -> bool:
    return not {"site-packages", "dist-packages", "test", "tests", "__pycache__", "lib2to3"} & set(path.parts)


def _ids(tokenizer: Tokenizer, texts: list[str]) -> Ids:
    return np.concatenate([np.array(each.ids, np.int32) for each in tokenizer.encode_batch(texts)])


if __name__ == "__main__":
    main()
