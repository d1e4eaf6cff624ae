"""The checks of parity: of kernels, of which wrong ones are caught and located; of prompts and codes, which are those
of upstream in every mode it has; and their command, whose file holds nobody's paths."""

import json
import shutil
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lane_player import CountingCodec, Player, exact_buckets, pages_for
from torch import Tensor
from upstream_models import loaded

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.cli import main
from mktts.errors import BackendUnavailable, CodecError
from mktts.measure.parity import codec, command, kernel
from mktts.measure.parity import upstream as parity
from mktts.measure.parity.command import name_of, without_paths
from mktts.measure.parity.upstream import DTYPES, compare_codes, made_up_voice, standard_requests
from mktts.model import qwen3
from mktts.model.backend import PromptRows
from mktts.model.oracle import TorchBackend
from mktts.model.prompt import Request
from mktts.model.sampling import Choice, Sampling
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME

SIZES, CONTEXTS, FRAMES, COMPARED = (8, 64), (16, 63, 700), 5, 2  # of a batched frame; COMPARED: of each context
slow = partial(pytest.param, marks=pytest.mark.slow)
SOURCES = ["random:tiny", "random:tiny-projected", "random:tiny:base", "random:tiny:voice_design"]


def backend_of(checkpoint: Checkpoint, dtype: torch.dtype, *changed: str) -> TorchBackend:
    tensors = checkpoint.tensors()
    tensors = {**tensors, **{name: tensors[name] * 1.05 for name in changed}}
    return TorchBackend(checkpoint.config, tensors, "cpu", dtype)


def forced_of(checkpoint: Checkpoint, tested=None, contexts=(6,)) -> dict:
    """tested: stands in the kernel's place; the bf16 oracle where it is None."""
    oracles = kernel.oracles_of(checkpoint, "cpu")
    frames = kernel.KernelUnderTest(tested or oracles[0]).frames
    loads = {rows: [(one, frames(one)) for one in kernel.random_streams(oracles[1], rows, 4, 2)] for rows in contexts}
    return kernel.forced_frames(loads, oracles)


def test_errors_are_relative_to_fp32_and_pooled_by_name():
    errors = kernel.ErrorRatio()
    fp32 = torch.tensor([3.0, 4.0])
    for name in ("a", "both"):
        errors.add(fp32 + torch.tensor([0.0, 1.0]), fp32 + torch.tensor([2.0, 0.0]), fp32, name)
    errors.add(fp32, fp32, fp32, "both")
    found = errors.found()
    assert found["a"] == pytest.approx({"kernel": 0.2, "bf16": 0.4, "ratio": 0.5})
    assert found["both"]["kernel"] == pytest.approx(0.2 / 2**0.5)


@pytest.mark.parametrize("name", ["tiny", "tiny_projected"])
def test_a_forced_frame_shows_the_logits_its_codes_were_chosen_from_and_leaves_the_same_state(name, request):
    checkpoint = request.getfixturevalue(name)
    backend, config = backend_of(checkpoint, torch.float32), checkpoint.config
    prompt, text = PromptRows(kernel.random_rows(backend, 8, 0)), kernel.random_rows(backend, 4, 1)
    free, made = (backend.start(prompt, kernel.GREEDY, 0, 4) for _ in range(2))
    said: list[int] = []
    for index in range(4):
        row = text[index] if index else None
        codes = backend.step(free, row).codes
        observed = kernel.forced(backend, made, row, codes)
        history = torch.tensor(said, dtype=torch.int64)
        chosen = [int(s.argmax()) for s in kernel.scores(observed.logits, history, config)]
        said.append(int(codes[0]))
        assert chosen == codes.tolist()
        assert [len(logits) for logits in observed.logits] == kernel.vocabularies(config)
    assert observed.hidden.shape == (config.talker.num_hidden_layers, config.talker.hidden_size)
    last = observed.hidden[-1]  # through the final norm it is the state that the heads saw
    normed = last / last.pow(2).mean().add(config.talker.rms_norm_eps).sqrt() * backend.talker.norm
    assert torch.allclose(normed, made.head_rows[-1], rtol=1e-4, atol=1e-5)
    keys = [state.cache.memory[:, 0, :, :, : state.cache.length] for state in (made, free)]
    assert torch.equal(*keys)


def test_the_bf16_oracle_against_itself_has_ratio_one_and_rounding_explains_where_it_differs(tiny_projected):
    found = forced_of(tiny_projected, contexts=(4, 12))
    errors, first = found["forced"], found["divergence"]
    assert errors["frames"] == {"4": 8, "12": 8} and errors["passed"] and first["passed"]
    assert set(errors["pooled"]) == {"logits of code 0", "logits of codes 1-15", "hidden"}
    for value in errors["pooled"].values():
        assert value["ratio"] == 1 and 1e-4 < value["bf16"] < 0.1
    assert first["diverged"] and first["explained"]
    assert 0 < first["fp32_gap"] <= 2 * first["bf16_largest_error"]


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ("talker.model.layers.0.mlp.down_proj.weight", "hidden"),
        ("talker.codec_head.weight", "logits of code 0"),
        ("talker.code_predictor.lm_head.7.weight", "logits of codes 1-15"),
    ],
)
def test_a_kernel_whose_weights_are_five_percent_off_somewhere_is_caught(tiny, changed, part):
    found = forced_of(tiny, backend_of(tiny, torch.bfloat16, changed))["forced"]
    assert not found["passed"] and found["pooled"][part]["ratio"] > 1.1


def test_fp32_never_differs_and_a_difference_beyond_rounding_is_not_explained(tiny):
    same = forced_of(tiny, backend_of(tiny, torch.float32))["divergence"]
    assert same == {"frames": 4, "diverged": False, "passed": True}
    wrong = backend_of(tiny, torch.bfloat16)
    wrong.heads[4] = wrong.heads[5]
    first = forced_of(tiny, wrong)["divergence"]
    assert first["diverged"] and first["codebook"] == 5 and not first["explained"] and not first["passed"]


def test_wide_margins_are_exact_and_a_wrong_head_is_located(tiny_margin):
    fp32, bf16 = backend_of(tiny_margin, torch.float32), backend_of(tiny_margin, torch.bfloat16)
    stream = kernel.spoken_stream(tiny_margin, fp32, 5)
    assert kernel.exact_codes(bf16, fp32, stream) == {"frames": 5, "asked": 5, "equal": True, "passed": True}
    bf16.heads[2] = bf16.heads[3]  # codebook 3
    found = kernel.exact_codes(bf16, fp32, stream)
    assert not found["passed"] and found["frames"] == 0
    assert found["first_difference"] == {"frame": 0, "codebook": 3}


def test_a_budget_that_is_over_makes_less_of_everything_and_says_so(tiny, tiny_margin):
    found = kernel.parity_of("random:tiny", kernel.Scope((16, 90), 8, 9), "torch", "cpu", until_s=0.0)
    assert found["passed"]
    assert set(found["forced"]["pooled"]) == {"logits of code 0", "logits of codes 1-15", "hidden"}
    assert found["forced"]["frames"] == {"16": 2, "90": 2}
    assert {"frames", "diverged", "passed"} <= set(found["divergence"])
    assert found["exact"] == {"frames": 1, "asked": 9, "equal": True, "passed": True}
    section = kernel.outcome(found)
    assert section["frames"] == 4 and "reason" not in section


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["random:tiny", "random:tiny-projected"])
def test_the_megakernels_errors_are_upstreams_beyond_the_rows_its_prefill_takes_too(source):
    found = kernel.parity_of(source, kernel.Scope((16, 200, 1_100), 60, 100), "megakernel", "cuda")
    assert found["passed"], found
    assert found["exact"]["frames"] == 100


# ---- the batched frame


class FrameInside:
    """What the newest tick of lanes did inside: methods of their frames are wrapped from outside."""

    def __init__(self, lanes: Any) -> None:
        from mktts.kernel.triton_kernels import compiling

        self._logits: list[Tensor] = [torch.empty(0)] * NUM_CODEBOOKS  # (lanes, vocabulary) each
        self._hidden: list[Tensor] = [torch.empty(0)] * lanes.config.talker.num_hidden_layers  # (lanes, H) each
        frames = [lanes._buckets[size] for size in sorted(lanes._buckets, reverse=True)]
        with torch.cuda.stream(lanes._stream), compiling():  # one by one they would take minutes
            for frame in frames:
                frame.run()
        for frame in frames:
            self._watch(frame)

    def _watch(self, frame: Any) -> None:
        draw, layer = frame._draw, frame._layer

        def watched_draw(logits: Tensor, book: int) -> None:
            self._logits[book] = logits.to(torch.float32, copy=True)
            draw(logits, book)

        def watched_layer(stack: Any, index: int, x: Tensor, *more: Any) -> None:
            layer(stack, index, x, *more)
            if stack is frame._weights.talker:
                self._hidden[index] = x[: frame.lane_count].to(torch.float32, copy=True)

        frame._draw, frame._layer = watched_draw, watched_layer

    def observed(self, lane: int, codes: Tensor, first: bool) -> kernel.Observed:
        """first: its frame came from the prompt, so it has no hidden states of its own."""
        hidden = None if first else torch.stack([of_layer[lane] for of_layer in self._hidden])
        return kernel.Observed(codes, [of_head[lane].clone() for of_head in self._logits], hidden)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("source", ["random:tiny", "random:tiny-projected"])
def test_errors_are_those_of_bf16_with_and_without_one_order_of_sums(source, deterministic):
    from mktts.batch.cuda.lanes import CudaLanes

    checkpoint = open_checkpoint(source)
    oracles = kernel.oracles_of(checkpoint, "cuda")
    compared = [one for rows in CONTEXTS for one in kernel.random_streams(oracles[1], rows, COMPARED, FRAMES)]
    others = kernel.random_streams(oracles[1], 2, max(SIZES) - len(compared), FRAMES)
    lanes = CudaLanes(
        checkpoint.config, checkpoint.tensors(), torch.device("cuda"), torch.bfloat16, slots=max(SIZES),
        positions=max(one.positions for one in compared), pages=pages_for([*others, *compared]),
        settings=exact_buckets(SIZES), graphs=False, deterministic=deterministic,
        codec=CountingCodec(max(SIZES) + 1, torch.device("cuda")),
    )  # fmt: skip
    inside, loads = FrameInside(lanes), {}
    for size in SIZES:
        first, seen = size - len(compared), {number: [] for number in range(size)}
        streams = [*others[:first], *compared]

        def watch(lane: int, number: int, frame: int, codes: Tensor, first=first, seen=seen) -> None:
            if number >= first:
                seen[number].append(inside.observed(lane, codes, frame == 0))

        one_each = [[stream] for stream in streams]
        Player(lanes, one_each, sounds=False, seed=size, size=size, plain=True, each=watch).play()
        loads[size] = [(streams[number], seen[number]) for number in range(first, size)]
    found = kernel.forced_frames(loads, oracles)
    assert found["forced"]["passed"] and found["divergence"]["passed"], found


# ---- prompts and codes


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


# Every source with every choice and type; greedy in fp32 and drawn in bf16 are enough for every run.
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("choice", "dtype"), [("greedy", "fp32"), ("sampled", "bf16"), slow("greedy", "bf16"), slow("sampled", "fp32")]
)
def test_codes_are_equal_frame_for_frame_in_every_mode(source, choice, dtype, tiny):
    checkpoint, upstream = loaded(source, DTYPES[dtype])
    sampling = checkpoint.sampling() if choice == "sampled" else checkpoint.sampling().greedy()
    requests = standard_requests(checkpoint)
    frames = 3  # the prompt's, one after it, and one whose history has both
    rows = compare_codes(checkpoint, requests, sampling, 7, frames, DTYPES[dtype], upstream)
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


# ---- the command


@pytest.fixture
def quick(monkeypatch, tiny) -> None:
    """Less of everything, and one load of upstream's model."""
    monkeypatch.setattr(command, "load_upstream", lambda checkpoint, dtype: loaded("random:tiny", dtype)[1])
    monkeypatch.setattr(command, "CODES_FRAMES", 3)
    monkeypatch.setattr(command, "CODES_REQUESTS", 1)
    monkeypatch.setattr(command, "SCOPE", kernel.Scope(contexts=(5,), frames=4, exact=4))
    monkeypatch.setattr(codec, "FRAMES", 20)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def run(quick, tmp_path, capsys) -> Callable[..., tuple[int, dict, dict]]:
    """Exit status, document and the sections of its first checkpoint."""

    def called(*words: str) -> tuple[int, dict, dict]:
        path = tmp_path / "parity.json"
        status = main(["parity", *words, "--device", "cpu", "--output", str(path)])
        document = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert document == json.loads(path.read_text())
        return status, document, next(iter(document["checkpoints"].values()))["sections"]

    return called


def test_what_is_right_passes_and_what_cannot_run_is_skipped_by_name(run, tiny_margin):
    status, document, found = run("random:tiny", "--kernel", "torch")
    assert status == 0 and document["passed"]
    assert [found[name]["status"] for name in ("prompt", "codes", "codec", "kernel")] == ["passed"] * 4
    assert found["prompt"]["prompts"] == found["prompt"]["equal"] >= 9
    assert found["codes"]["frames"] == found["codes"]["asked"] == 6
    assert {row["sampled"] for row in found["codes"]["rows"]} == {True, False}
    assert found["codec"]["whole_to_upstream"]["snr_db"] > 100
    assert all(value["seconds"] >= 0 for value in found.values())
    assert found["kernel"]["ratio"]["hidden"] == 1
    whole = document["checkpoints"]["random:tiny"]  # as notebook 03 reads it
    assert set(whole) >= {"checkpoint", "forced", "divergence", "exact", "passed"}
    assert whole["forced"]["frames"] == {"5": 8} and whole["forced"]["pooled"]["hidden"]["ratio"] == 1
    assert whole["exact"] == {"frames": 4, "asked": 4, "equal": True, "passed": True}
    named = whole["checkpoint"]
    assert len(named["sha256"]["config.json"]) == 64 and named["weights"].startswith("random weights")
    assert document["packages"]["qwen_tts"].startswith("qwen-tts") and document["environment"]["torch"]
    status, document, found = run("random:tiny", "--parts", "kernel")
    assert status == 1 and not document["passed"], "where nothing could run nothing is proven"
    assert [(one["status"], one["reason"]) for one in found.values()] == [("skipped", "no CUDA device")]


def test_a_prompt_a_codec_and_a_norm_that_are_off_or_broken_are_found(run, monkeypatch):
    def unrounded(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)  # upstream rounds before the weight

    whole = codec.decode_streamed
    monkeypatch.setattr(codec, "decode_streamed", lambda *given: whole(*given) * 0.999)
    build, off = command.compare_prompts, {"equal": False, "max_abs_error": 0.5}
    monkeypatch.setattr(command, "compare_prompts", lambda *given: [row | off for row in build(*given)])
    status, document, found = run("random:tiny", "--parts", "codec,prompt")
    assert status == 1 and not document["passed"]
    assert "60.0 dB, at least 100 dB" in found["codec"]["reason"] and found["codec"]["status"] == "failed"
    assert "prompts are not upstream's" in found["prompt"]["reason"]

    broken = Mock(side_effect=RuntimeError("no room in /some/where/file.bin"))
    monkeypatch.setattr(codec, "codec_for", broken)
    monkeypatch.setattr(command, "compare_prompts", build)
    monkeypatch.setattr(qwen3, "rms_norm", unrounded)
    status, document, found = run("random:tiny", "--parts", "prompt,codes,codec")
    assert status == 1 and found["codec"]["reason"] == "RuntimeError: no room in file.bin"
    assert found["codes"]["status"] == "failed" and "codebook" in found["codes"]["reason"]
    assert found["prompt"]["status"] == "passed"  # an error within a section leaves the others


def test_without_upstream_the_codec_is_compared_with_ours_alone(run, monkeypatch):
    absent = Mock(side_effect=BackendUnavailable("the upstream package qwen-tts is needed"))
    monkeypatch.setattr(command, "load_upstream", absent)
    status, document, found = run("random:tiny", "--parts", "prompt,codes,codec")
    assert status == 0
    assert [found[name]["status"] for name in ("prompt", "codes", "codec")] == ["skipped", "skipped", "passed"]
    assert "qwen-tts is needed" in found["prompt"]["reason"] and "qwen-tts is needed" in found["codec"]["upstream"]


def test_bad_input_is_refused_before_anything_is_measured(checkpoint_cache, tmp_path, capsys):
    tiny = "random:tiny"
    for words in ([tiny, "--parts", "prompt,sound"], [tiny, "--minutes", "0"], [str(tmp_path / "absent")]):
        assert main(["parity", *words, "--output", str(tmp_path / "parity.json")]) == 2
    assert "prompt, codes, codec, kernel" in capsys.readouterr().err


def test_time_that_is_short_makes_less_and_says_how_much(tiny, quick, monkeypatch):
    monkeypatch.setattr(command, "CODES_REQUESTS", 3)
    upstream = lru_cache(1)(lambda: command.load_upstream(tiny, torch.bfloat16))
    codes = command.codes_section(tiny, upstream, 0.0)
    assert codes["frames"] == 6 and codes["asked"] == 18 and "reason" not in codes  # one utterance greedy, one drawn
    assert codec.codec_section(tiny, upstream, "cpu", 0.0)["frames"] == 8


def test_a_checkpoint_is_named_without_its_place_and_other_words_with_strokes_stay(tiny: Checkpoint, tmp_path, run):
    folder = tmp_path / "somebody" / "my voice"
    shutil.copytree(tiny.folder, folder)
    assert name_of(str(folder)) == "my voice"
    assert [name_of(source) for source in ("small", "random:tiny", "Qwen/X")] == ["small", "random:tiny", "Qwen/X"]
    _, document, _ = run(str(folder), "--parts", "prompt")
    assert list(document["checkpoints"]) == ["my voice"]
    assert str(tmp_path) not in json.dumps(document) and "somebody" not in json.dumps(document)
    cleaned = without_paths({"a": ["read /at/me/config.json: expected", "~/voices/a.bin", "C:\\Users\\me\\b.bin"]})
    assert cleaned == {"a": ["read config.json: expected", "a.bin", "b.bin"]}
    kept = "Qwen/Qwen3-TTS https://example.org/a/b and/or 16/32/64 speech_tokenizer/config.json"
    assert without_paths(kept) == kept


def test_errors_are_told_per_frame_and_as_signal_over_noise_in_decibels():
    pcm, reference = np.zeros((2, 3 * SAMPLES_PER_FRAME))
    pcm[SAMPLES_PER_FRAME - 1], pcm[SAMPLES_PER_FRAME] = 0.25, -0.5
    assert codec.frame_errors(pcm, reference).tolist() == [0.25, 0.5, 0.0]
    with pytest.raises(CodecError, match="equal lengths"):
        codec.frame_errors(pcm[:-1], reference)
    signal = np.ones(1000)
    assert codec.snr_db(signal * 0.9, signal) == pytest.approx(20.0)
    assert codec.snr_db(signal, signal) == float("inf")
