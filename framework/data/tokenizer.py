"""Byte-level BPE tokenizers: trained on the corpus, or read from a tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

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


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json.

    Raises ValueError: where the file is missing, is not a tokenizer, or has no end-of-text token.
    """
    if not path.is_file():
        raise ValueError(f"tokenizer.path={path}: no such file; give the path of a tokenizer.json")
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
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


def encode(tokenizer: Tokenizer, texts: Sequence[str], dtype: np.dtype) -> list[NDArray[np.integer]]:
    """Token ids of each text. Special tokens spelled out in a text are read as plain text, not obeyed."""
    tokenizer.encode_special_tokens = True
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, dtype=dtype) for encoding in encodings]
