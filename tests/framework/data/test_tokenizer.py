"""The tokenizers: what training gives, what a file must have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from counterflow.framework.data import tokenizer as bpe

TEXTS = [
    f"def function_{number}(value):\n    return value + {number}  # {'ä' * 3}\n" for number in range(200)
]

TRAIN = """
import sys
from counterflow.framework.data import tokenizer as bpe
from tests.framework.data.test_tokenizer import TEXTS
sys.stdout.write(bpe.train_bpe(iter(TEXTS), 400).to_str())
"""


def test_text_survives_and_transformers_agrees(tmp_path: Path) -> None:
    tokenizer = bpe.train_bpe(TEXTS, 400)
    assert bpe.vocab_size(tokenizer) <= 400
    assert bpe.end_of_text_id(tokenizer) == 0
    text = "unseen Ω text 😀\n\tdef function_7(value)"
    (ids,) = bpe.encode(tokenizer, [text], np.dtype("uint16"))
    assert tokenizer.decode(ids.tolist()) == text
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert theirs.encode(text) == ids.tolist()


def test_training_is_the_same_with_one_thread_and_with_two() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", TRAIN],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "RAYON_NUM_THREADS": str(threads), "PYTHONHASHSEED": str(threads)},
            capture_output=True,
            check=True,
        ).stdout
        for threads in (1, 2)
    }
    assert len(found) == 1


def test_a_special_token_in_a_text_is_plain_text() -> None:
    tokenizer = bpe.train_bpe(TEXTS, 400)
    (ids,) = bpe.encode(tokenizer, ["a <|endoftext|> b"], np.dtype("uint16"))
    assert bpe.end_of_text_id(tokenizer) not in ids
    assert tokenizer.decode(ids.tolist()) == "a <|endoftext|> b"


def test_limits_in_a_tokenizer_file_are_lifted(tmp_path: Path) -> None:
    tokenizer = bpe.train_bpe(TEXTS, 300)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=1000)
    tokenizer.save(str(tmp_path / "t.json"))
    loaded = bpe.load_tokenizer(tmp_path / "t.json")
    (ids,) = bpe.encode(loaded, [TEXTS[0]], np.dtype("uint16"))
    assert loaded.decode(ids.tolist()) == TEXTS[0]


def test_added_tokens_count_in_the_vocabulary() -> None:
    tokenizer = bpe.train_bpe(TEXTS, 300)
    before = bpe.vocab_size(tokenizer)
    tokenizer.add_tokens(["<extra>"])
    assert bpe.vocab_size(tokenizer) == before + 1


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.json: no such file; give the path"):
        bpe.load_tokenizer(tmp_path / "missing.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json: not a tokenizer\.json"):
        bpe.load_tokenizer(tmp_path / "bad.json")
    record = json.loads(bpe.train_bpe(TEXTS, 300).to_str())
    record["added_tokens"] = []
    del record["model"]["vocab"][bpe.END_OF_TEXT]
    (tmp_path / "endless.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"no end-of-text token: one of <\|endoftext\|>"):
        bpe.load_tokenizer(tmp_path / "endless.json")
