"""Byte-level BPE tokenizers: trained on the corpus, or read from a tokenizer.json."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
# What published tokenizers call the end of a document, in order of preference.
_END_NAMES = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<|endofdocument|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "[SEP]",
)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE (Sennrich et al., arXiv 1508.07909; on bytes as in GPT-2) with at most
    `vocab_size` entries, `<|endoftext|>` being entry 0. The result depends on the texts alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read_tokenizer_file(path: Path) -> bytes:
    """What is in the file of a tokenizer.

    Raises ValueError: where it is missing, is no regular file, or cannot be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError(f"tokenizer.path={path} is no regular file; give the path of a tokenizer.json")
        return path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"tokenizer.path={path}: no such file; give the path of a tokenizer.json") from None
    except OSError as error:
        raise ValueError(
            f"tokenizer.path={path} cannot be read ({error.strerror}); give the path of a readable tokenizer.json"
        ) from None


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json. Raises ValueError: where the file cannot be read, or what `parse_tokenizer` does."""
    return parse_tokenizer(read_tokenizer_file(path), path)


def parse_tokenizer(data: bytes, path: Path) -> Tokenizer:
    """The tokenizer in `data`, which was read from `path`.

    Raises ValueError: where it is not a tokenizer, or has no end-of-text token.
    """
    try:
        tokenizer: Tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises bare Exception for whatever is wrong in the file
        raise ValueError(
            f"tokenizer.path={path}: not a tokenizer.json of the Hugging Face tokenizers library ({error})"
        ) from None
    end_of_text_id(tokenizer)
    # Published files may carry the limits of the model they came with.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """The token that separates documents.

    Raises ValueError: where the tokenizer has none of the known names.
    """
    for name in _END_NAMES:
        if (token := tokenizer.token_to_id(name)) is not None:
            return int(token)
    raise ValueError(
        f"the tokenizer has no end-of-text token: one of {', '.join(_END_NAMES)} must be in its vocabulary; "
        "add it to the tokenizer.json"
    )


def vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the largest token id; added tokens count, gaps too."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """What a tokenizer does with text that it has no token for.

    unknown_id: the token that stands for such text. drops: it leaves such text out, as a BPE does that knows
    neither all bytes nor an unknown token.
    """

    unknown_id: int | None = None
    drops: bool = False


def gaps_of(tokenizer: Tokenizer) -> Gaps:
    """Read off the tokenizer's definition; one on bytes that has them all has no gaps."""
    record: dict[str, Any] = json.loads(tokenizer.to_str())
    model = record["model"]
    unknown_id: int | None = model.get("unk_id")  # Unigram's
    name = model.get("unk_token")
    if isinstance(name, str):
        unknown_id = tokenizer.token_to_id(name)
    vocabulary = model["vocab"] if isinstance(model["vocab"], dict) else {}
    steps = json.dumps([record.get("normalizer"), record.get("pre_tokenizer")])
    knows_bytes = (
        '"ByteLevel"' in steps and vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    ) or (
        model.get("byte_fallback") is True and vocabulary.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}
    )
    return Gaps(
        unknown_id=unknown_id, drops=model["type"] == "BPE" and not knows_bytes and unknown_id is None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The token ids of one text, and how much of it they do not express (see `Gaps`)."""

    ids: NDArray[np.integer]
    num_unknown_tokens: int
    num_dropped_characters: int


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], dtype: np.dtype, gaps: Gaps | None = None
) -> list[Encoded]:
    """Token ids of each text. Special tokens spelled out in a text are read as plain text, not obeyed.

    Raises ValueError: where the tokenizer fails, as one does that needs an unknown token and has none.
    """
    gaps = gaps or Gaps()
    tokenizer.encode_special_tokens = True
    # The quick way does not say which characters a token stands for.
    method = tokenizer.encode_batch if gaps.drops else tokenizer.encode_batch_fast
    try:
        encodings = method(texts, add_special_tokens=False)
    except Exception as error:  # tokenizers raises bare Exception here too
        raise ValueError(
            f"the tokenizer cannot encode the text ({error}); take one that can, or add what it lacks to its file"
        ) from None
    found: list[Encoded] = []
    for text, encoding in zip(texts, encodings, strict=True):
        ids = np.array(encoding.ids, dtype=dtype)
        num_unknown = 0 if gaps.unknown_id is None else int(np.count_nonzero(ids == gaps.unknown_id))
        num_dropped = _num_uncovered(text, encoding.offsets) if gaps.drops else 0
        found.append(Encoded(ids=ids, num_unknown_tokens=num_unknown, num_dropped_characters=num_dropped))
    return found


def _num_uncovered(text: str, offsets: Sequence[tuple[int, int]]) -> int:
    """How many characters, other than spaces, are in no token's range."""
    covered = np.zeros(len(text) + 1, dtype=np.int64)
    for start, end in offsets:
        covered[start] += 1
        covered[end] -= 1
    uncovered = np.flatnonzero(np.cumsum(covered)[:-1] == 0)
    return sum(not text[position].isspace() for position in uncovered)
