"""The tokenizers: what training gives, what a file must have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
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


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    return [found.ids for found in bpe.encode(tokenizer, texts, np.dtype("uint16"))]


def test_text_survives_and_transformers_agrees(tmp_path: Path) -> None:
    tokenizer = bpe.train_bpe(TEXTS, 400)
    assert bpe.vocab_size(tokenizer) <= 400
    assert bpe.end_of_text_id(tokenizer) == 0
    text = "unseen Ω text 😀\n\tdef function_7(value)"
    (ids,) = encode(tokenizer, [text])
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
    (ids,) = encode(tokenizer, ["a <|endoftext|> b"])
    assert bpe.end_of_text_id(tokenizer) not in ids
    assert tokenizer.decode(ids.tolist()) == "a <|endoftext|> b"


def test_limits_in_a_tokenizer_file_are_lifted(tmp_path: Path) -> None:
    tokenizer = bpe.train_bpe(TEXTS, 300)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=1000)
    tokenizer.save(str(tmp_path / "t.json"))
    loaded = bpe.load_tokenizer(tmp_path / "t.json")
    (ids,) = encode(loaded, [TEXTS[0]])
    assert loaded.decode(ids.tolist()) == TEXTS[0]


def test_added_tokens_count_in_the_vocabulary() -> None:
    tokenizer = bpe.train_bpe(TEXTS, 300)
    before = bpe.vocab_size(tokenizer)
    tokenizer.add_tokens(["<extra>"])
    assert bpe.vocab_size(tokenizer) == before + 1


UNKNOWN = {"<|endoftext|>": 0, "[UNK]": 1, "a": 2, "b": 3}
ALL_BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<|endoftext|>": 256, "<unk>": 257, "a": 258}


@pytest.mark.parametrize(
    ("model", "num_unknown", "num_dropped"),
    [
        (models.WordLevel({**UNKNOWN, "ab": 4}, unk_token="[UNK]"), 2, 0),
        (models.WordPiece({**UNKNOWN, "ab": 4}, unk_token="[UNK]"), 2, 0),
        (models.Unigram([(name, -1.0 - rank) for name, rank in UNKNOWN.items()], unk_id=1), 2, 0),
        (models.BPE(UNKNOWN, [], unk_token="[UNK]", fuse_unk=True), 2, 0),
        (models.BPE(UNKNOWN, []), 0, 3),
        (models.BPE(ALL_BYTES, [], byte_fallback=True), 0, 0),
        (models.BPE(ALL_BYTES, [], unk_token="<unk>", byte_fallback=True), 0, 0),
    ],
    ids=["words", "wordpiece", "unigram", "fused", "dropping", "bytes", "bytes_and_unknown"],
)
def test_what_a_tokenizer_cannot_express_is_counted(
    tmp_path: Path, model: models.Model, num_unknown: int, num_dropped: int
) -> None:
    """Two of three words have no token, of one character and of two; transformers sees as many."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    gaps = bpe.gaps_of(tokenizer)
    (found,) = bpe.encode(tokenizer, ["ab é 語語"], np.dtype("uint16"), gaps)
    assert (found.num_unknown_tokens, found.num_dropped_characters) == (num_unknown, num_dropped)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    name = "<unk>" if tokenizer.token_to_id("<unk>") else "[UNK]"
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), unk_token=name)
    ids: list[int] = theirs.encode("ab é 語語", add_special_tokens=False)
    assert found.ids.tolist() == ids
    assert ids.count(tokenizer.token_to_id(name) or -1) == num_unknown


def test_a_tokenizer_on_bytes_has_no_gaps() -> None:
    assert bpe.gaps_of(bpe.train_bpe(TEXTS, 300)) == bpe.Gaps()


def test_a_tokenizer_that_fails_on_a_text_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<|endoftext|>": 0}, unk_token="[UNK]"))
    with pytest.raises(
        ValueError, match=r"the tokenizer cannot encode the text \(WordLevel error.*take one that can"
    ):
        bpe.encode(tokenizer, ["word"], np.dtype("uint16"))


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.json: no such file; give the path"):
        bpe.load_tokenizer(tmp_path / "missing.json")
    os.mkfifo(tmp_path / "pipe.json")
    for name in (".", "pipe.json"):
        with pytest.raises(ValueError, match=r"is no regular file; give the path"):
            bpe.load_tokenizer(tmp_path / name)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json: not a tokenizer\.json"):
        bpe.load_tokenizer(tmp_path / "bad.json")
    record = json.loads(bpe.train_bpe(TEXTS, 300).to_str())
    record["added_tokens"] = []
    del record["model"]["vocab"][bpe.END_OF_TEXT]
    (tmp_path / "endless.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"no end-of-text token: one of <\|endoftext\|>"):
        bpe.load_tokenizer(tmp_path / "endless.json")
