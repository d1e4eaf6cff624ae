"""The kernel's parity check, with torch backends in the kernel's place: right ones pass, wrong ones are caught."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from mktts.checkpoint import Checkpoint
from mktts.errors import CapacityError
from mktts.kernel.backend import MegakernelBackend
from mktts.kernel.launch import _TAG_LIMIT, Params
from mktts.measure.parity.budget import Budget
from mktts.measure.parity.kernel import Scope, Sides, exact_frames, first_divergence, forced_errors, parity_of
from mktts.measure.parity.probe import (
    Errors,
    KernelProbe,
    TorchProbe,
    compare,
    forced,
    random_rows,
    scores,
    vocabularies,
)
from mktts.model.backend import PromptRows
from mktts.model.oracle import TorchBackend
from mktts.model.sampling import Sampling
from mktts.spec import NUM_CODEBOOKS

GREEDY = Sampling().greedy()


def backend_of(checkpoint: Checkpoint, dtype: torch.dtype, changed: str | None = None) -> TorchBackend:
    tensors = dict(checkpoint.tensors())
    if changed is not None:
        tensors[changed] = tensors[changed] * 1.05
    return TorchBackend(checkpoint.config, tensors, "cpu", dtype)


def sides_of(checkpoint: Checkpoint, tested: TorchBackend | None = None) -> Sides:
    bf16, fp32 = backend_of(checkpoint, torch.bfloat16), backend_of(checkpoint, torch.float32)
    return Sides(checkpoint, TorchProbe(tested or bf16), bf16, fp32)


def test_relative_errors_are_root_sums_of_squares_over_all_that_has_a_name():
    ours, theirs = Errors(), Errors()
    ours.add(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]), "a", "b")
    ours.add(torch.tensor([3.0]), torch.tensor([1.0]), "a")
    theirs.add(torch.tensor([1.5]), torch.tensor([1.0]), "a", "b")
    found = compare(ours, theirs)
    assert found["a"]["kernel"] == pytest.approx(math.sqrt(5 / 3))
    assert found["a"]["ratio"] == pytest.approx(2 * math.sqrt(5 / 3))
    assert found["b"] == pytest.approx({"kernel": math.sqrt(1 / 2), "bf16": 0.5, "ratio": math.sqrt(2)})


@pytest.mark.parametrize("name", ["tiny", "tiny_projected"])
def test_a_forced_frame_shows_the_logits_its_codes_were_chosen_from_and_leaves_the_same_state(name, request):
    checkpoint = request.getfixturevalue(name)
    backend, config = backend_of(checkpoint, torch.float32), checkpoint.config
    prompt, text = PromptRows(random_rows(backend, 8, 0)), random_rows(backend, 4, 1)
    free, made = (backend.start(prompt, GREEDY, 0, 4) for _ in range(2))
    for index in range(4):
        row = text[index] if index else None
        history = free.history[: free.frames].clone()
        codes = backend.step(free, row).codes
        observed = forced(backend, made, row, codes)
        chosen = [int(s.argmax()) for s in scores(observed.logits, history, GREEDY, config)]
        assert chosen == codes.tolist()
        assert [len(logits) for logits in observed.logits] == vocabularies(config)
    assert observed.hidden.shape == (config.talker.num_hidden_layers, config.talker.hidden_size)
    last = observed.hidden[-1]  # through the final norm it is the state that the heads saw
    normed = last / last.pow(2).mean().add(config.talker.rms_norm_eps).sqrt() * backend.talker.norm
    assert torch.allclose(normed, made.hidden[0, 0], rtol=1e-4, atol=1e-5)
    assert torch.equal(made.cache.keys[:, :, :, : made.cache.length], free.cache.keys[:, :, :, : free.cache.length])


def test_the_bf16_oracle_against_itself_has_ratio_one_and_passes(tiny_projected):
    found = forced_errors(sides_of(tiny_projected), (4, 12), 3, Sampling())
    assert found["frames"] == {"4": 3, "12": 3} and found["passed"]
    for value in (*found["pooled"].values(), *found["by_head"], *found["by_layer"], *found["by_context"].values()):
        assert value["ratio"] == 1 and 1e-4 < value["bf16"] < 0.1
    assert len(found["by_head"]) == NUM_CODEBOOKS
    assert len(found["by_layer"]) == tiny_projected.config.talker.num_hidden_layers
    for sides in found["total_variation"].values():
        assert sides["kernel"] == sides["bf16"] and 0 < sides["bf16"]["mean"] <= sides["bf16"]["max"] < 1


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ("talker.model.layers.0.mlp.down_proj.weight", "hidden"),
        ("talker.codec_head.weight", "logits of code 0"),
        ("talker.code_predictor.lm_head.7.weight", "logits of codes 1-15"),
    ],
)
def test_a_kernel_whose_weights_are_five_percent_off_somewhere_is_caught(tiny, changed, part):
    wrong = backend_of(tiny, torch.bfloat16, changed)
    found = forced_errors(sides_of(tiny, wrong), (6,), 4, Sampling())
    assert not found["passed"] and found["pooled"][part]["ratio"] > 1.1


def test_fp32_against_itself_never_diverges_and_bf16_does_where_rounding_explains_it(tiny):
    same = first_divergence(sides_of(tiny, backend_of(tiny, torch.float32)), 6)
    assert same == {"frames": 6, "asked": 6, "diverged": False, "passed": True}
    found = first_divergence(sides_of(tiny), 60)
    assert found["diverged"] and found["explained"] and found["passed"]
    assert 0 < found["fp32_gap"] <= found["kernel_error_of_the_two"] <= 2 * found["bf16_largest_error"]


def test_a_divergence_beyond_rounding_is_not_explained(tiny):
    wrong = backend_of(tiny, torch.bfloat16)
    wrong.heads[4] = wrong.heads[5]
    found = first_divergence(sides_of(tiny, wrong), 4)
    assert (found["frame"], found["codebook"]) <= (0, 5)
    assert found["codebook"] < 5 or not found["passed"]


def test_wide_margins_are_frame_exact_and_a_wrong_kernel_is_located(tiny_margin):
    fp32 = backend_of(tiny_margin, torch.float32)
    assert exact_frames(tiny_margin, backend_of(tiny_margin, torch.bfloat16), fp32, 24)["equal"]
    wrong = backend_of(tiny_margin, torch.bfloat16)
    wrong.heads[2] = wrong.heads[3]  # codebook 3
    found = exact_frames(tiny_margin, wrong, fp32, 24)
    assert found["equal"] is False and (found["frames"], found["codebook"]) == (0, 3) and not found["passed"]


def test_the_kernels_inside_is_cut_to_each_heads_vocabulary(tiny):
    config = tiny.config
    talker, predictor = vocabularies(config)[:2]
    rows = torch.arange(NUM_CODEBOOKS)[:, None].expand(-1, talker).to(torch.bfloat16)
    debug = SimpleNamespace(logits=rows, hidden=torch.ones(config.talker.num_hidden_layers, 4, dtype=torch.bfloat16))
    codes = torch.zeros(NUM_CODEBOOKS, dtype=torch.int64)
    fake = SimpleNamespace(
        config=config,
        new_debug=lambda: debug,
        step=lambda state, text, shown: SimpleNamespace(codes=codes),
        _prefill=SimpleNamespace(capacity=16),
    )
    probe = KernelProbe(fake)
    first, later = probe.step(None, None), probe.step(None, torch.zeros(4))
    assert first.hidden is None and later.hidden.shape == (config.talker.num_hidden_layers, 4)
    assert [len(logits) for logits in later.logits] == [talker] + [predictor] * (NUM_CODEBOOKS - 1)
    assert [float(logits[0]) for logits in later.logits] == list(range(NUM_CODEBOOKS))


class Limited:
    """A kernel on the CPU: the oracle, with a prefill of at most `capacity` rows and row by row after that."""

    def __init__(self, oracle: TorchBackend, capacity: int) -> None:
        self.oracle, self.config, self.device, self.dtype = oracle, oracle.config, oracle.device, oracle.dtype
        self._prefill = SimpleNamespace(capacity=capacity)
        self.put: list[int] = []

    def new_debug(self) -> SimpleNamespace:
        talker = self.config.talker
        return SimpleNamespace(
            logits=torch.zeros(NUM_CODEBOOKS, talker.vocab_size),
            hidden=torch.zeros(talker.num_hidden_layers, talker.hidden_size),
        )

    def start(self, prompt: PromptRows, sampling: Sampling, seed: int, max_frames: int):
        rows = len(prompt.embeds)
        if rows > self._prefill.capacity:
            raise CapacityError(f"{rows} rows")
        state = self.oracle.start(prompt, sampling, seed, max_frames)
        state.prompt_rows = rows
        return state

    def put_rows(self, state, rows: torch.Tensor, position: int) -> SimpleNamespace:
        assert position == state.cache.length and rows.is_contiguous() and rows.dtype == self.dtype
        for row in rows:
            state.hidden = state.head_rows = self.oracle.talker.forward(row[None, None], state.cache)
        self.put.append(len(rows))
        return SimpleNamespace(synchronize=lambda: None)

    def step(self, state, text: torch.Tensor | None, debug: SimpleNamespace):
        assert state.prompt_rows + max(0, state.frames - 1) == state.cache.length
        if state.frames >= state.max_frames:
            raise CapacityError("no more frames")
        frame = self.oracle.step(state.copy(), text)
        if frame.codes is not None:
            observed = forced(self.oracle, state, text, frame.codes)
            for room, logits in zip(debug.logits, observed.logits, strict=True):
                room[: len(logits)] = logits
            if observed.hidden is not None:
                debug.hidden.copy_(observed.hidden)
        return frame


@pytest.mark.parametrize("context", [16, 17, 90])
def test_a_context_beyond_the_kernels_prefill_is_reached_row_by_row_with_the_oracles_rows(tiny_projected, context):
    bf16, fp32 = (backend_of(tiny_projected, dtype) for dtype in (torch.bfloat16, torch.float32))
    kernel = Limited(fp32, 16)
    sides = Sides(tiny_projected, KernelProbe(kernel), bf16, fp32)
    found = forced_errors(sides, (context,), 5, Sampling())
    assert found["frames"] == {str(context): 5} and found["passed"]
    assert found["prompt_rows_one_by_one"] == {str(context): context - 16}
    assert sum(kernel.put) == context - 16 and max(kernel.put, default=0) <= 32
    for value in (*found["by_head"], *found["by_layer"]):
        assert value["kernel"] < 1e-4 < value["bf16"]


def test_rows_beyond_the_kernels_prefill_that_come_in_another_order_are_caught(tiny):
    bf16, fp32 = (backend_of(tiny, dtype) for dtype in (torch.bfloat16, torch.float32))
    kernel = Limited(bf16, 16)
    sides = Sides(tiny, KernelProbe(kernel), bf16, fp32)
    assert forced_errors(sides, (40,), 3, Sampling())["passed"]
    kernel.put_rows = lambda state, rows, position: Limited.put_rows(kernel, state, rows.flip(0), position)
    assert not forced_errors(sides, (40,), 3, Sampling())["passed"]


def test_a_stream_has_room_for_the_frames_it_was_asked_for_after_rows_put_one_by_one(tiny):
    kernel = Limited(backend_of(tiny, torch.float32), 8)
    probe = KernelProbe(kernel)
    state = probe.start(PromptRows(random_rows(kernel.oracle, 50, 0)), GREEDY, 0, 2)
    assert kernel.put == [32, 10] and (state.max_frames, state.prompt_rows) == (2, 50)
    probe.step(state, None)
    probe.step(state, torch.zeros(tiny.config.talker.hidden_size))
    with pytest.raises(CapacityError):
        probe.step(state, torch.zeros(tiny.config.talker.hidden_size))


def test_rows_put_one_by_one_stand_where_they_belong_and_stay_within_a_launchs_tags(tiny):
    launches = []
    backend = SimpleNamespace(
        config=tiny.config,
        _params=lambda state, rows: Params(),
        _launcher=SimpleNamespace(layer_exchanges=5, launch=lambda params, tags: launches.append((params, tags))),
    )
    MegakernelBackend.put_rows(backend, SimpleNamespace(frames=0), torch.zeros(32, 4), 1_024)
    ((params, tags),) = launches
    assert (params.prefill, params.frames, params.stream.position) == (1, 32, 1_024)
    assert tags == 32 * 5 * tiny.config.talker.num_hidden_layers < _TAG_LIMIT


def test_a_budget_that_is_over_makes_fewer_frames_of_everything_and_says_so(tiny, tiny_margin):
    scope = Scope((4, 12), forced=9, exact=9, divergence=9)
    found = parity_of("random:tiny", scope, "torch", "cpu", budget=Budget(0))
    assert found["passed"] and not found["errors"]
    assert found["forced"]["frames"] == {"4": 2, "12": 2} and found["forced"]["asked"] == 9
    assert set(found["forced"]["pooled"]) == {"logits of code 0", "logits of codes 1-15", "hidden"}
    assert (found["divergence"]["frames"], found["divergence"]["asked"]) == (2, 9)
    assert (found["exact"]["frames"], found["exact"]["asked"]) == (1, 9)


def test_a_part_that_fails_is_named_and_the_others_still_count(tiny, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("mktts.measure.parity.kernel.forced_errors", broken)
    found = parity_of("random:tiny", Scope((4,), 2, 0, 2), "torch", "cpu")
    assert found["errors"] == {"forced": "RuntimeError: out of memory"} and not found["passed"]
    assert found["divergence"]["frames"] == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["tiny", "tiny_projected"])
def test_the_megakernels_errors_stay_upstreams_beyond_the_rows_its_prefill_takes(name, request):
    sides = Sides.load(request.getfixturevalue(name), "megakernel", "cuda")
    found = forced_errors(sides, (1_100,), 20, Sampling())
    assert found["passed"] and found["prompt_rows_one_by_one"] == {"1100": 76}, found["pooled"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["tiny", "tiny_projected"])
def test_the_megakernels_errors_are_upstreams_and_rounding_explains_its_first_divergence(name, request):
    sides = Sides.load(request.getfixturevalue(name), "megakernel", "cuda")
    found = forced_errors(sides, (16, 200), 30, Sampling())
    assert found["passed"], found["pooled"]
    divergence = first_divergence(sides, 40)
    assert divergence["passed"], divergence


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_megakernel_is_frame_exact_on_wide_margins(tiny_margin):
    sides = Sides.load(tiny_margin, "megakernel", "cuda")
    found = exact_frames(tiny_margin, sides.kernel.backend, sides.fp32, 100)
    assert found["equal"], found
