"""The kernel's parity check, with torch backends in the kernel's place: right ones pass, wrong ones are caught."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from mktts import text_parity
from mktts.checkpoint import Checkpoint
from mktts.kernel_parity import Sides, exact_frames, first_divergence, forced_errors, main
from mktts.probe import KernelProbe, TorchProbe, forced, random_rows, scores, vocabularies
from mktts.relative import Errors, compare
from mktts.sampling import Sampling
from mktts.spec import NUM_CODEBOOKS
from mktts.torch_backend import TorchBackend

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
    prompt, text = random_rows(backend, 8, 0), random_rows(backend, 4, 1)
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
    assert same == {"frames": 6, "diverged": False, "passed": True}
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
        config=config, new_debug=lambda: debug, step=lambda state, text, shown: SimpleNamespace(codes=codes)
    )
    probe = KernelProbe(fake)
    first, later = probe.step(None, None), probe.step(None, torch.zeros(4))
    assert first.hidden is None and later.hidden.shape == (config.talker.num_hidden_layers, 4)
    assert [len(logits) for logits in later.logits] == [talker] + [predictor] * (NUM_CODEBOOKS - 1)
    assert [float(logits[0]) for logits in later.logits] == list(range(NUM_CODEBOOKS))


def test_the_command_writes_what_it_prints_and_a_part_that_fails_is_named(tmp_path, capsys, monkeypatch, tiny):
    monkeypatch.setattr(text_parity, "CONTEXTS", (5, 9))
    monkeypatch.setattr(text_parity, "_TOKENS", 6)
    monkeypatch.setattr(text_parity, "_EXACT_TOKENS", 6)
    monkeypatch.setattr("mktts.ahead._make", lambda kind, source: None)  # tiny ones are made where they are opened
    path = tmp_path / "parity.json"
    few = ["--contexts", "5", "--forced-frames", "2", "--exact-frames", "4", "--device", "cpu", "--kernel", "torch"]
    words = ["--checkpoint", "random:tiny", *few, "--text-model", "random:tiny", "--output", str(path)]
    assert main(words) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads(path.read_text())
    assert document["passed"] and document["checkpoints"]["random:tiny"]["exact"]["frames"] == 4
    assert document["text"]["margin"]["equal"] == document["text"]["margin"]["tokens"] == 12
    assert document["text"]["ordinary"]["errors"]["logits"]["ratio"] == 1

    words[1], words[-3] = str(tmp_path / "absent"), ""
    assert main(words) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    (result,) = document["checkpoints"].values()
    assert "absent" in result["errors"]["checkpoint"] and not document["passed"]


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
