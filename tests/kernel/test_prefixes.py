"""Which rows of a prompt no text changes, by which key they are found, and what is kept of them."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from mktts.checkpoint import open_checkpoint
from mktts.kernel.prefill import Prefill, copy_into_cache, kept_of_cache
from mktts.measure.parity.upstream import made_up_voice
from mktts.model.prompt import FedPrompt, Prompt, PromptBuilder, Request
from mktts.model.qwen3 import Qwen3Stack
from mktts.model.voice import Voice

TEXTS = ("Hello there.", "Quite another text, and a longer one at that.", "x")
BASE, CUSTOM, DESIGN = "random:tiny:base", "random:tiny-projected", "random:tiny:voice_design"
ROLE, SPECIAL = 3, 1  # rows: the role's, codec padding with begin-of-text
TAGS = {"auto": 3, "english": 4}  # think, begin, (language,) end


@cache
def builder(source: str) -> PromptBuilder:
    checkpoint = open_checkpoint(source)
    return PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer())


def voice(frames: int) -> Voice:
    return made_up_voice(open_checkpoint(BASE), frames)


def made_of(layout: str, requests: list[Request]) -> list[Prompt | FedPrompt]:
    """layout: "fed" too, character by character."""
    made = []
    for request in requests:
        by = builder(BASE if request.voice else CUSTOM if request.speaker else DESIGN)
        if layout != "fed":
            made.append(by.build(replace(request, layout=layout)))
            continue
        made.append(FedPrompt(by, by.check(replace(request, text="", layout="streaming"))))
        for char in request.text:
            made[-1].push(char)
        made[-1].close()
    return made


def assert_maximal(prompts: list[Prompt | FedPrompt]) -> int:
    """The prefix rows of prompts that differ in text only: the same bits, one key, and another row behind them."""
    (rows,), (key,) = {p.prefix_rows for p in prompts}, {p.prefix_key for p in prompts}
    assert key is not None and all(0 < rows < len(p.embeds) for p in prompts)
    first, *others = (p.embeds for p in prompts)
    for other in others:
        assert torch.equal(other[:rows], first[:rows])
        assert not torch.equal(other[rows], first[rows])
    return rows


@pytest.mark.parametrize("layout", ["whole", "streaming", "fed"])
@pytest.mark.parametrize("language", ["auto", "english"])
@pytest.mark.parametrize(
    ("source", "instruct"),
    [(BASE, None), *((of, said) for of in (CUSTOM, DESIGN) for said in (None, "Whisper, slowly."))],
)
def test_the_prefix_ends_where_the_text_begins(source, instruct, language, layout):
    who = {CUSTOM: {"speaker": "ryan"}, DESIGN: {}, BASE: {"voice": voice(0)}}[source]
    requests = [Request(text, language, instruct=instruct, **who) for text in TEXTS]
    rows = assert_maximal(made_of(layout, requests))
    turn = len(builder(source).tokenizer.encode(f"user\n{instruct}")) + 3 if instruct else 0
    assert rows == turn + ROLE + TAGS[language] + len(who) + SPECIAL


@pytest.mark.parametrize(("layout", "frames"), [("fed", 30), ("fed", 60), ("whole", 30), ("streaming", 30)])
@pytest.mark.parametrize("language", ["auto", "english"])
def test_a_recordings_transcript_is_in_the_prefix_of_fed_text_alone(language, layout, frames):
    """Text that is known is projected together with it, which rounds by the number of rows."""
    prompts = made_of(layout, [Request(text, language, voice=voice(frames)) for text in TEXTS])
    transcript = builder(BASE).tokenizer.encode(voice(frames).transcript) if layout == "fed" else []
    assert {p.prefix_rows for p in prompts} == {ROLE + TAGS[language] + 1 + SPECIAL + len(transcript)}
    assert len({p.prefix_key for p in prompts}) == 1
    head = prompts[0].embeds[: prompts[0].prefix_rows]
    assert all(torch.equal(p.embeds[: len(head)], head) for p in prompts)
    assert layout != "fed" or assert_maximal(prompts)


def test_a_prompt_that_the_transcript_fills_keeps_its_last_row():
    frames = 2
    assert len(builder(BASE).tokenizer.encode(voice(frames).transcript)) > frames + 1
    prompts = made_of("fed", [Request(text, voice=voice(frames)) for text in TEXTS])
    (rows,) = {p.prefix_rows for p in prompts}
    assert rows == len(prompts[0].embeds) - 1 and len({p.prefix_key for p in prompts}) == 1
    assert all(torch.equal(p.embeds, prompts[0].embeds) for p in prompts)


def test_keys_are_equal_exactly_where_prefixes_are(tmp_path):
    """Every pair of requests of a checkpoint: built, fed, both layouts, all that a prefix is made of."""
    other_voice = replace(voice(0), embedding=voice(0).embedding + 1)
    other_codes = replace(voice(30), codes=voice(30).codes.flip(0))
    other_words = replace(voice(30), transcript="Other words.")
    saved = Voice.load(voice(30).save(tmp_path / "voice.safetensors"))
    requests = {
        CUSTOM: [
            Request("A", language, speaker, instruct)
            for language in ("auto", "chinese", "english")
            for speaker in ("eric", "ryan")
            for instruct in (None, "Loud.", "loud.")
        ],
        DESIGN: [Request("A", of, instruct=said) for of in ("auto", "french") for said in (None, "Calm.", "Low.")],
        BASE: [
            Request("A", language, voice=v)
            for language in ("auto", "german")
            for v in (voice(0), voice(0), other_voice, voice(30), saved, other_codes, other_words)
        ],
    }
    for source, some in requests.items():
        prompts = [prompt for layout in ("whole", "streaming", "fed") for prompt in made_of(layout, some)]
        prefixes = [p.embeds[: p.prefix_rows] for p in prompts]
        for a, one in zip(prompts, prefixes, strict=True):
            for b, other in zip(prompts, prefixes, strict=True):
                same = torch.equal(one, other)
                # Voices that share an embedding share a prefix of known text, under keys of their own.
                assert same or a.prefix_key != b.prefix_key
                assert a.prefix_key == b.prefix_key or not same or source == BASE


@pytest.fixture(scope="module")
def stack(tiny) -> Qwen3Stack:
    return Qwen3Stack(tiny.config.talker, tiny.tensors(), "talker.model.", torch.device("cpu"), torch.bfloat16)


def prompts_of(*speakers: str, text: str = TEXTS[0]) -> list[Prompt]:
    return [builder("random:tiny").build(Request(text, speaker=speaker, layout="streaming")) for speaker in speakers]


def cache_of(stack: Qwen3Stack) -> torch.Tensor:
    c = stack.config
    return torch.zeros(c.num_hidden_layers, c.num_key_value_heads, 4, 40, 2, c.head_dim, dtype=torch.bfloat16)


def run(prefill: Prefill, prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
    kv = cache_of(prefill.stack)
    return prefill.fill(prompt.embeds, kv, prompt.prefix_rows, prompt.prefix_key), kv


def test_a_known_prefix_gives_the_bits_of_a_new_one_and_speakers_do_not_mix(stack):
    prompts = [prompts_of("ryan", text=text)[0] for text in TEXTS] + prompts_of("vivian", "eric")
    nothing = Prefill(stack)
    nothing.max_bytes = 0
    expected = [run(nothing, prompt) for prompt in prompts]
    assert not torch.equal(expected[0][0], expected[-1][0]) and nothing.prefix_bytes == 0
    prefill = Prefill(stack)
    for order in (1, -1):
        for prompt, bits in list(zip(prompts, expected, strict=True))[::order]:
            assert all(map(torch.equal, run(prefill, prompt), bits))
    rows = prompts[0].prefix_rows + sum(prompt.prefix_rows for prompt in prompts[-2:])
    assert prefill.prefix_bytes == rows * stack.config.kv_bytes_per_position
    alone = cache_of(stack)
    copy_into_cache(prefill.prefix(prompts[0].embeds[: prompts[0].prefix_rows], prompts[0].prefix_key), alone)
    kept = [kept_of_cache(kv, prompts[0].prefix_rows) for kv in (alone, expected[0][1])]
    assert torch.equal(*kept) and prefill.prefix_bytes == rows * stack.config.kv_bytes_per_position


def test_the_least_recently_used_goes_first(stack, monkeypatch):
    ryan, vivian, serena = prompts_of("ryan", "vivian", "serena")  # of no dialect: prefixes are equally long
    each = ryan.prefix_rows * stack.config.kv_bytes_per_position
    prefill = Prefill(stack)
    prefill.max_bytes = 2 * each
    passes, made = prefill.run, []
    monkeypatch.setattr(prefill, "run", lambda *at: made.append(at) or passes(*at))
    for prompt, computed in ((ryan, 2), (vivian, 2), (ryan, 1), (serena, 2), (ryan, 1), (vivian, 2)):
        run(prefill, prompt)
        assert (len(made), prefill.prefix_bytes <= 2 * each) == (computed, True)
        made.clear()


def test_a_voice_that_is_forgotten_takes_its_prefixes_along_and_no_others(stack):
    prefill = Prefill(stack)
    anna = voice(0)
    ben = replace(anna, embedding=-anna.embedding)
    for who in (anna, ben):
        for language in ("auto", "english"):
            prompt = builder(BASE).build(Request("Hello.", language, voice=who, layout="streaming"))
            rows = torch.zeros_like(prompt.embeds, dtype=torch.bfloat16)
            prefill.fill(rows, cache_of(stack), prompt.prefix_rows, prompt.prefix_key)
    held = prefill.prefix_bytes
    prefill.forget(anna)
    assert prefill.prefix_bytes == held // 2 > 0
    prefill.forget(ben)
    assert prefill.prefix_bytes == 0
