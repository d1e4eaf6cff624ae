"""The kernel's parity check, with torch in the kernel's place: right ones pass, wrong ones are caught and located. On a
CUDA device the kernel itself, and the batched frame, whose error to fp32 is no larger than bf16 PyTorch's."""

from typing import Any

import pytest
import torch
from lane_player import CountingCodec, Player, exact_buckets, pages_for
from torch import Tensor

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.measure.parity import kernel
from mktts.model.backend import PromptRows
from mktts.model.oracle import TorchBackend
from mktts.spec import NUM_CODEBOOKS


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

SIZES, CONTEXTS, FRAMES, COMPARED = (8, 64), (16, 63, 700), 5, 2  # COMPARED: of each context
DEVICE = torch.device("cuda")


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
        checkpoint.config, checkpoint.tensors(), DEVICE, torch.bfloat16, slots=max(SIZES),
        positions=max(one.positions for one in compared), pages=pages_for([*others, *compared]),
        settings=exact_buckets(SIZES), graphs=False, deterministic=deterministic,
        codec=CountingCodec(max(SIZES) + 1, DEVICE),
    )  # fmt: skip
    inside, loads = FrameInside(lanes), {}
    for size in SIZES:
        streams = [*others[: size - len(compared)], *compared]
        first, seen = size - len(compared), {number: [] for number in range(size)}

        def watch(lane: int, number: int, frame: int, codes: Tensor, first=first, seen=seen) -> None:
            if number >= first:
                seen[number].append(inside.observed(lane, codes, frame == 0))

        one_each = [[stream] for stream in streams]
        Player(lanes, one_each, sounds=False, seed=size, size=size, plain=True, each=watch).play()
        loads[size] = [(streams[number], seen[number]) for number in range(first, size)]
    found = kernel.forced_frames(loads, oracles)
    assert found["forced"]["passed"] and found["divergence"]["passed"], found
