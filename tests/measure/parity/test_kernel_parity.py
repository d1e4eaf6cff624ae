"""The kernels' parity check, with torch in the kernels' place: right ones pass, wrong ones are caught and located."""

import pytest
import torch

from mktts.batch.plain import CodecLanes, TorchLanes
from mktts.checkpoint import Checkpoint
from mktts.codec.decoder import CodecDecoder
from mktts.measure.parity import codec, kernel, ratio
from mktts.measure.parity.batch import LanesUnderTest, RandomTicks, random_load
from mktts.measure.parity.upstream import our_codes
from mktts.model.backend import PromptRows
from mktts.model.oracle import TorchBackend

SCOPE = kernel.Scope(contexts=(16, 90), frames=8, exact=9, lanes=(2, 5), lane_frames=4, lane_exact=5, watched=3)


def backend_of(checkpoint: Checkpoint, dtype: torch.dtype, changed: str | None = None) -> TorchBackend:
    tensors = dict(checkpoint.tensors())
    if changed is not None:
        tensors[changed] = tensors[changed] * 1.05
    return TorchBackend(checkpoint.config, tensors, "cpu", dtype)


def forced_of(checkpoint: Checkpoint, tested=None, contexts=(6,)) -> dict:
    """tested: stands in the kernel's place; the bf16 oracle where it is None."""
    oracles = kernel.oracles_of(checkpoint, "cpu")
    loads = {rows: random_load(oracles[1], 4, 4, (rows,), 2) for rows in contexts}
    return kernel.forced_frames(kernel.KernelUnderTest(tested or oracles[0]), oracles, loads)


def lanes_of(checkpoint: Checkpoint, dtype: torch.dtype, slots: int = 5) -> TorchLanes:
    decoder = CodecDecoder(checkpoint.codec_config, checkpoint.codec_tensors())
    return TorchLanes(checkpoint.config, checkpoint.tensors(), decoder, slots, 200, 1 << 28, dtype)


def shown(lane: int, codes: torch.Tensor, first: bool) -> ratio.Observed:
    """Of lanes that show nothing but their codes, and whether they came from the prompt."""
    return ratio.Observed(codes, [], None if first else torch.empty(0))


# ---- the measure


def test_errors_are_relative_to_fp32_and_pooled_by_name():
    errors = ratio.ErrorRatio()
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
    prompt, text = PromptRows(ratio.random_rows(backend, 8, 0)), ratio.random_rows(backend, 4, 1)
    free, made = (backend.start(prompt, ratio.GREEDY, 0, 4) for _ in range(2))
    said: list[int] = []
    for index in range(4):
        row = text[index] if index else None
        codes = backend.step(free, row).codes
        observed = ratio.forced(backend, made, row, codes)
        history = torch.tensor(said, dtype=torch.int64)
        chosen = [int(s.argmax()) for s in ratio.scores(observed.logits, history, ratio.GREEDY, config)]
        said.append(int(codes[0]))
        assert chosen == codes.tolist()
        assert [len(logits) for logits in observed.logits] == ratio.vocabularies(config)
    assert observed.hidden.shape == (config.talker.num_hidden_layers, config.talker.hidden_size)
    last = observed.hidden[-1]  # through the final norm it is the state that the heads saw
    normed = last / last.pow(2).mean().add(config.talker.rms_norm_eps).sqrt() * backend.talker.norm
    assert torch.allclose(normed, made.hidden[0, 0], rtol=1e-4, atol=1e-5)
    assert torch.equal(made.cache.keys[:, :, :, : made.cache.length], free.cache.keys[:, :, :, : free.cache.length])


def test_the_bf16_oracle_against_itself_has_ratio_one_and_rounding_explains_where_it_differs(tiny_projected):
    found = forced_of(tiny_projected, contexts=(4, 12))
    errors, first = found["forced"], found["divergence"]
    assert errors["frames"] == {"4": 8, "12": 8} and errors["asked"] == 8 and errors["passed"] and first["passed"]
    assert set(errors["pooled"]) == {"logits of code 0", "logits of codes 1-15", "hidden"}
    for value in errors["pooled"].values():
        assert value["ratio"] == 1 and 1e-4 < value["bf16"] < 0.1
    for sides in errors["total_variation"].values():
        assert sides["kernel"] == sides["bf16"] and 0 < sides["bf16"]["mean"] <= sides["bf16"]["max"] < 1
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


# ---- many lanes


def test_wide_margins_are_exact_in_every_lane_and_a_wrong_head_is_located(tiny_margin):
    fp32, lanes = backend_of(tiny_margin, torch.float32), lanes_of(tiny_margin, torch.bfloat16)
    streams = ratio.spoken_streams(tiny_margin, fp32, 3, 5)
    assert len({len(stream.embeds) for stream in streams}) > 1
    tested = LanesUnderTest(lanes, shown, 3)
    found = kernel.exact_codes(tested, fp32, streams, SCOPE.lanes)
    assert found == {"frames": 35, "asked": 35, "equal": True, "passed": True}

    heads = lanes._backend.heads
    heads[2] = heads[3]  # codebook 3
    found = kernel.exact_codes(tested, fp32, streams, (2,))
    assert not found["passed"] and found["frames"] == 0
    assert found["first_difference"] == {"load": 2, "stream": 0, "frame": 0, "codebook": 3}


def test_streams_in_random_ticks_have_the_oracles_codes_whatever_the_ticks_and_the_last_are_observed(tiny):
    fp32 = backend_of(tiny, torch.float32)
    streams = [s for size in (6, 3) for s in random_load(fp32, size, 3, SCOPE.contexts, 4)]  # more than there are lanes
    expected = [our_codes(fp32, stream, stream.sampling, stream.seed, 4) for stream in streams]
    lanes = lanes_of(tiny, torch.float32, 4)
    free = lanes.pages.free
    for seed in (0, 1):
        made = RandomTicks(lanes, streams, 4, seed).play()
        assert all(torch.equal(found, codes) for found, codes in zip(made, expected, strict=True))
        assert lanes.pages.free == free
    seen = dict(LanesUnderTest(lanes, shown, 3).observed(streams, 4))
    assert list(seen) == [6, 7, 8]
    for number, frames in seen.items():
        assert torch.equal(torch.stack([frame.codes for frame in frames]), expected[number])
        assert [frame.hidden is None for frame in frames] == [True, False, False, False]


# ---- all of a checkpoint


@pytest.fixture(params=[False, True], ids=["kernel", "batch"])
def batch(request, monkeypatch) -> bool:
    """Of the batched frame: the oracle in its place, and in that of its codec PyTorch's lanes, 120 dB off."""

    def decode(checkpoint, device, lanes, precision):
        plain = CodecLanes(CodecDecoder(checkpoint.codec_config, checkpoint.codec_tensors()), lanes)
        for slot in range(lanes):
            plain.enter(slot, None)
        return lambda codes: (1 - 2**-20) * plain.decode(codes, range(lanes))

    def oracle(checkpoint, *given):
        return kernel.KernelUnderTest(backend_of(checkpoint, torch.bfloat16))

    monkeypatch.setattr(kernel, "cuda_lanes", oracle)
    monkeypatch.setattr(codec, "_lanes_decode", decode)
    monkeypatch.setattr(codec, "_BATCH_FRAMES", 16)
    return request.param


def test_a_budget_that_is_over_makes_less_of_everything_and_says_so(tiny, tiny_margin, batch):
    found = kernel.parity_of("random:tiny", SCOPE, "torch", "cpu", batch=batch, budget=ratio.Budget(0))
    assert found["passed"]
    for compared in (found["deterministic"], found["cublas"]) if batch else (found,):
        assert set(compared["forced"]["pooled"]) == {"logits of code 0", "logits of codes 1-15", "hidden"}
        assert compared["forced"]["frames"] == ({"2": 2, "5": 2} if batch else {"16": 2, "90": 2})
        assert {"frames", "diverged", "passed"} <= set(compared["divergence"])
        made = {"frames": 7, "asked": 35} if batch else {"frames": 1, "asked": 9}
        assert compared["exact"] == {**made, "equal": True, "passed": True}
    section = kernel.outcome(found)
    assert section["frames"] == (8 if batch else 4) and "reason" not in section
    if batch:
        assert found["codec"]["frames"] == 8 and section["codec_db"]["full"] > 100
        found["codec"]["passed"] = False
        assert "codec" in kernel.outcome(found)["reason"]


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["random:tiny", "random:tiny-projected"])
def test_the_megakernels_errors_are_upstreams_beyond_the_rows_its_prefill_takes_too(source):
    found = kernel.parity_of(source, kernel.Scope((16, 200, 1_100), 60, 100), "megakernel", "cuda")
    assert found["passed"], found
    assert found["exact"]["frames"] == 100


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["random:tiny", "random:tiny-projected"])
def test_the_batched_frames_errors_are_upstreams_with_and_without_one_order_of_sums(source):
    scope = kernel.Scope((16, 63, 700), lanes=(8, 64), lane_frames=5, lane_exact=12)
    found = kernel.parity_of(source, scope, "megakernel", "cuda", batch=True)
    assert found["passed"], {k: v for k, v in found.items() if k != "codec"}
    for mode in ("deterministic", "cublas"):
        assert found[mode]["exact"]["frames"] == 12 * 72
    assert found["codec"]["full"]["snr_db"] > 80 and found["codec"]["fast"]["snr_db"] > 50
