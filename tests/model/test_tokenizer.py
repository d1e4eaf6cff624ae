"""Token ids against transformers' own Qwen2 tokenizer, and against themselves when the text comes in parts."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.errors import CheckpointError, TextError
from mktts.model.tokenizer import IncrementalTokenizer, TextTokenizer

TEXTS = [
    "iPhone",
    "My iPhone runs JavaScript, YouTube and GitHub; NaN is not LaTeX.",
    "สวัสดีครับ ภาษาไทย กำลังเรียน",
    "Call 0123456789 at 3.14 or 1,000 ²½ ٣٤",
    "don't DON'T I'll we've HE'S 'tis rock'n'roll x'",
    "你好，世界。今天天气很好！「こんにちは」 안녕하세요",
    "e\u0301 \u00e9 \u1100\u1161\u11a8 \u0915\u094d\u0937 a\u0316\u0301 \u212b",
    "👩‍👩‍👧‍👦 🇩🇪 1️⃣ 😀😀",
    "def f(x):\n\treturn x**2  # square\r\n\r\n\n  if (a != b) { }",
    "  two  spaces\u3000wide\u00a0hard \t tab\n \n end  ",
    "assistant user assistants\n\nuser",
    "\x00 \x07 \x1c \x7f \u200b \u2028 \ufeff",
]


@pytest.fixture(scope="module")
def tokenizer(tiny: Checkpoint) -> TextTokenizer:
    return tiny.tokenizer()


@pytest.fixture(scope="module")
def reference(tiny: Checkpoint) -> object:
    """transformers' tokenizer on the same files, as it treats a Hub id."""
    from transformers import Qwen2TokenizerFast

    return Qwen2TokenizerFast.from_pretrained(tiny.folder)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_transformers_ids(tokenizer, reference, text):
    assert tokenizer.encode(text) == reference(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_ids_are_transformers_ids_for_any_text(tokenizer, reference, text):
    """Any but the added tokens' own, which hypothesis finds in the package's source: here those are characters."""
    assume(not any(added in text for added in reference.get_added_vocab()))
    assert tokenizer.encode(text) == reference(text, add_special_tokens=False)["input_ids"]


def test_the_prompt_layout_ids_are_upstreams_and_special_tokens_in_the_text_stay_text(tokenizer, tiny, reference):
    ids = tiny.config.text_ids
    wrapped = "<|im_start|>assistant\niPhone<|im_end|>\n<|im_start|>assistant\n"
    newline = tokenizer.encode("\n")
    role = [ids.im_start, ids.assistant, *newline]
    assert reference(wrapped)["input_ids"] == [*role, *tokenizer.encode("iPhone"), ids.im_end, *newline, *role]
    assert tokenizer.encode("assistant") == [ids.assistant]
    assert tokenizer.encode("2024") == [tokenizer.encode(digit)[0] for digit in "2024"]
    assert reference("<tts_pad><tts_text_bos><tts_text_eod>")["input_ids"] == [ids.tts_pad, ids.tts_bos, ids.tts_eos]
    assert max(tokenizer.encode("a <|im_end|> <|im_start|> <tts_pad> b")) < ids.im_start - 1


@pytest.mark.parametrize("bad", [None, b"bytes", 3, "half a pair \ud83d"])
def test_what_is_not_text_is_refused(tokenizer, bad):
    with pytest.raises(TextError, match="expected"):
        tokenizer.encode(bad)
    with pytest.raises(TextError, match="expected"):
        IncrementalTokenizer(tokenizer).push(bad)


def test_broken_tokenizer_files_are_named(tmp_path):
    (tmp_path / "vocab.json").write_text("{")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"vocab.json: expected a BPE vocabulary"):
        TextTokenizer.load(tmp_path)


def test_a_vocabulary_of_another_model_is_refused(tiny, tmp_path):
    folder = Path(shutil.copytree(tiny.folder, tmp_path / "copy"))
    vocab = json.loads((folder / "vocab.json").read_text())
    vocab["assistant"], vocab["user"] = vocab["user"], vocab["assistant"]
    (folder / "vocab.json").write_text(json.dumps(vocab))
    with pytest.raises(CheckpointError, match=r"expected 'assistant' to be the one token 77091 .*found \[872\]"):
        open_checkpoint(folder).tokenizer()


# every kind of character whose neighbours can change how it is cut, composed or stripped
PARTS = st.sampled_from(
    [" ", "  ", "\n", "\r\n", "\t", "\u3000", "\x1c", "\x85", "'", "'s", "'t", "re", "ll", "a", "Z", "the", "iPhone"]
    + ["1", "²", ".", "!", "...", "-", "/", "e", "\u0301", "\u0316", "\u030a", "A", "か", "\u3099", "\u1100", "\u1161"]
    + ["\u11a8", "각", "ส", "\u0e35", "\u09c7", "\u09be", "好", "，", "😀", "\u200d", "\ufe0f", "=", "\u0338", "\x00"]
)


@settings(max_examples=250, deadline=None)
@given(parts=st.lists(PARTS | st.text(max_size=4), max_size=25))
def test_any_split_of_a_text_gives_the_ids_of_the_whole(tokenizer, parts):
    whole = tokenizer.encode("".join(parts).strip())
    incremental = IncrementalTokenizer(tokenizer)
    ids: list[int] = []
    for part in parts:
        ids += incremental.push(part)
        assert ids == whole[: len(ids)]
    assert ids + incremental.finish() == whole


def test_ids_come_as_soon_as_nothing_can_change_them(tokenizer):
    incremental = IncrementalTokenizer(tokenizer)
    assert incremental.push("  the") == []  # could become "then"
    assert incremental.push(" ") == tokenizer.encode("the")
    assert incremental.push("world") == []
    assert incremental.push(".") == tokenizer.encode(" world")
    assert incremental.push("\n") == []  # a line break joins the full stop, unless the text ends here
    assert incremental.finish() == tokenizer.encode(".")
    with pytest.raises(TextError, match="finished"):
        incremental.push("more")
