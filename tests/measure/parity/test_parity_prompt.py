"""Prompt embeddings bit-equal to what upstream qwen-tts hands its talker, for every mode it has."""

import pytest
import torch
from upstream_models import loaded

from mktts.checkpoint import open_checkpoint
from mktts.engine.upstream import prompt_embeds
from mktts.measure.parity.upstream import DTYPES, compare_prompts, made_up_voice, standard_requests
from mktts.model.prompt import PromptBuilder, Request

SOURCES = ["random:tiny", "random:tiny-projected", "random:tiny:base", "random:tiny:voice_design"]


def unequal(source: str, dtype: str, requests) -> list[dict]:
    checkpoint, upstream = loaded(source, DTYPES[dtype])
    rows = compare_prompts(checkpoint, requests, DTYPES[dtype], upstream)
    assert len(rows) == len(requests) and all((row["max_abs_error"] == 0) == row["equal"] for row in rows)
    return [row for row in rows if not row["equal"]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", SOURCES)
def test_every_mode_is_bit_equal(source, dtype, tiny):
    assert unequal(source, dtype, standard_requests(open_checkpoint(source))) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_speaker_is_bit_equal_in_its_dialect_and_out_of_it(tiny, dtype):
    assert {name for name, dialect in tiny.config.dialects.items() if dialect} == {"eric", "dylan"}
    requests = [
        Request("你好 there", language, speaker, layout=layout)
        for speaker in tiny.config.speakers
        for language in ("auto", "chinese", "english")
        for layout in ("whole", "streaming")
    ]
    assert unequal("random:tiny", dtype, requests) == []


def test_every_language_is_bit_equal(tiny):
    languages = [name for name in tiny.config.languages if "dialect" not in name]
    assert len(languages) == 10
    assert unequal("random:tiny", "bf16", [Request("a b", name.title(), "Vivian") for name in languages]) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["whole", "streaming"])
def test_references_shorter_as_long_as_and_longer_than_the_text_are_bit_equal(tiny_base, layout, dtype):
    tokenizer, text = tiny_base.tokenizer(), "Some words to say."
    transcript = made_up_voice(tiny_base, 1).transcript
    rows = len(tokenizer.encode(transcript)) + len(tokenizer.encode(text)) + 1  # text rows with end-of-text
    voices = [made_up_voice(tiny_base, frames) for frames in (1, rows - 2, rows - 1, rows, rows + 9)]
    assert unequal("random:tiny:base", dtype, [Request(text, voice=voice, layout=layout) for voice in voices]) == []


def test_surrounding_space_and_the_default_layouts_are_treated_alike(tiny, tiny_base, tiny_design):
    for source, request in (
        ("random:tiny", Request("\n Hello. ", speaker="ryan")),
        ("random:tiny:voice_design", Request(" Hello.\n", instruct=" Loud. ")),
        ("random:tiny:base", Request("\tHello.", voice=made_up_voice(tiny_base, 2))),
    ):
        assert unequal(source, "bf16", [request]) == []


@pytest.mark.parametrize("word", ["iPhone", "JavaScript", "สวัสดี"])
def test_a_local_folder_makes_upstream_swap_the_pre_tokenizer_and_ours_stays_with_the_hub(tiny, word):
    request = Request(word, speaker="ryan")
    prompt = PromptBuilder(tiny.config, tiny.tensors(), tiny.tokenizer()).build(request)
    on_the_hub = prompt_embeds(loaded("random:tiny", torch.bfloat16)[1], request)[0]
    in_a_folder = prompt_embeds(loaded("random:tiny", torch.bfloat16, "local")[1], request)[0]
    assert torch.equal(prompt.embeds, on_the_hub)
    assert len(in_a_folder) != len(on_the_hub)
