"""Prompt embeddings bit-equal to what upstream qwen-tts hands its talker, and codes of the torch backend equal to its
own generate, frame for frame, greedy and sampled: for every mode it has, on the CPU."""

import itertools

import pytest
import torch
from upstream_models import loaded

from mktts.checkpoint import open_checkpoint
from mktts.measure.parity import upstream as parity
from mktts.measure.parity.upstream import DTYPES, compare_codes, made_up_voice, standard_requests
from mktts.model.prompt import Request
from mktts.model.sampling import Choice, Sampling
from mktts.spec import NUM_CODEBOOKS

SOURCES = ["random:tiny", "random:tiny-projected", "random:tiny:base", "random:tiny:voice_design"]
FRAMES = 3  # the prompt's, one after it, and one whose history has both


def test_the_requests_below_are_twenty_texts_over_all_modes(tiny):
    requests = [request for source in SOURCES for request in standard_requests(open_checkpoint(source))]
    assert len({request.text for request in requests}) >= 20
    assert {(r.voice is None, r.voice is not None and r.voice.codes is None) for r in requests} == {
        (True, False), (False, True), (False, False)
    }  # fmt: skip
    assert {request.layout for request in requests} == {None, "whole", "streaming"}


def unequal(source: str, dtype: str, requests) -> list[dict]:
    checkpoint, upstream = loaded(source, DTYPES[dtype])
    rows = parity.compare_prompts(checkpoint, requests, DTYPES[dtype], upstream)
    assert len(rows) == len(requests) and all((row["max_abs_error"] == 0) == row["equal"] for row in rows)
    return [row for row in rows if not row["equal"]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", SOURCES)
def test_every_mode_is_bit_equal(source, dtype, tiny):
    assert unequal(source, dtype, standard_requests(open_checkpoint(source))) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_language_is_bit_equal_and_every_speaker_in_its_dialect_and_out_of_it(tiny, dtype):
    assert {name for name, dialect in tiny.config.dialects.items() if dialect} == {"eric", "dylan"}
    languages = [name for name in tiny.config.languages if "dialect" not in name]
    assert len(languages) == 10
    requests = [Request("a b", name.title(), "Vivian") for name in languages]
    requests += [
        Request("你好 there", language, speaker, layout=layout)
        for speaker in tiny.config.speakers
        for language in ("auto", "chinese", "english")
        for layout in ("whole", "streaming")
    ]
    assert unequal("random:tiny", dtype, requests) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["whole", "streaming"])
def test_references_shorter_as_long_as_and_longer_than_the_text_are_bit_equal(tiny_base, layout, dtype):
    tokenizer, text = tiny_base.tokenizer(), "Some words to say."
    transcript = made_up_voice(tiny_base, 1).transcript
    rows = len(tokenizer.encode(transcript)) + len(tokenizer.encode(text)) + 1  # text rows with end-of-text
    voices = [made_up_voice(tiny_base, frames) for frames in (1, rows - 2, rows - 1, rows, rows + 9)]
    assert unequal("random:tiny:base", dtype, [Request(text, voice=voice, layout=layout) for voice in voices]) == []


def test_surrounding_space_default_layouts_and_words_that_another_pre_tokenizer_cuts_are_treated_alike(tiny_base):
    texts = ("\n Hello. ", "iPhone", "JavaScript", "สวัสดี")
    assert unequal("random:tiny", "bf16", [Request(text, speaker="ryan") for text in texts]) == []
    assert unequal("random:tiny:voice_design", "bf16", [Request(" Hello.\n", instruct=" Loud. ")]) == []
    assert unequal("random:tiny:base", "bf16", [Request("\tHello.", voice=made_up_voice(tiny_base, 2))]) == []


def crossed() -> list:
    """Every source with every choice and type; greedy in fp32 and drawn in bf16 are enough for every run."""
    quick = {("greedy", "fp32"), ("sampled", "bf16")}
    rows = itertools.product(SOURCES, ("greedy", "sampled"), DTYPES)
    return [pytest.param(*row, marks=() if row[1:] in quick else pytest.mark.slow) for row in rows]


@pytest.mark.parametrize(("source", "choice", "dtype"), crossed())
def test_codes_are_equal_frame_for_frame_in_every_mode(source, choice, dtype, tiny):
    checkpoint, upstream = loaded(source, DTYPES[dtype])
    sampling = checkpoint.sampling() if choice == "sampled" else checkpoint.sampling().greedy()
    requests = standard_requests(checkpoint)
    rows = compare_codes(checkpoint, requests, sampling, 7, FRAMES, DTYPES[dtype], upstream)
    assert [row for row in rows if not row["equal"]] == []
    assert len(rows) == len(requests) and min(row["frames"] for row in rows) >= 2


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(Choice(top_p=0.7), Choice(top_p=0.9, top_k=0)),
        Sampling(Choice(top_k=0, temperature=1.0), Choice(top_k=1)),
        Sampling(Choice(temperature=0.3), Choice(do_sample=False), repetition_penalty=1.0),
        Sampling(Choice(do_sample=False), Choice(temperature=2.0, top_k=5), repetition_penalty=1.5),
    ],
    ids=["top-p", "no top-k", "greedy predictor, no penalty", "greedy talker, strong penalty"],
)
def test_every_sampling_setting_means_what_it_means_upstream(tiny, sampling):
    checkpoint, upstream = loaded("random:tiny", torch.float32)
    rows = compare_codes(checkpoint, standard_requests(checkpoint)[:2], sampling, 3, 12, torch.float32, upstream)
    assert [row for row in rows if not row["equal"]] == []


@pytest.mark.parametrize(("size", "max_frames"), [("tiny", 1), ("tiny", 2), ("tiny", 20), ("tiny-projected", 20)])
def test_end_of_speech_and_the_frame_limit_come_at_upstreams_frame(tiny, size, max_frames):
    checkpoint, upstream = loaded(f"random:{size}:margin:eos9", torch.float32)
    requests, greedy = [Request("Hello.", speaker="ryan")], Sampling().greedy()
    (row,) = compare_codes(checkpoint, requests, greedy, 0, max_frames, torch.float32, upstream)
    assert row["equal"] and row["frames"] == min(max_frames, 9)


def test_a_mismatch_is_named_by_frame_and_codebook():
    codes, other = torch.zeros(2, 4, NUM_CODEBOOKS, dtype=torch.int64)
    other[2, 5] = 1
    assert parity.first_mismatch(other, codes) == (2, 5)
    assert parity.first_mismatch(codes[:3], codes) == parity.first_mismatch(codes, codes[:3]) == (3, 0)


@pytest.mark.slow
def test_full_size_0_6b_custom_voice_codes_are_upstreams():
    checkpoint, upstream = loaded("random:0.6b", torch.bfloat16)
    for sampling in (checkpoint.sampling().greedy(), checkpoint.sampling()):
        rows = compare_codes(checkpoint, standard_requests(checkpoint)[:1], sampling, 0, 12, torch.bfloat16, upstream)
        assert [row["equal"] for row in rows] == [True], rows
