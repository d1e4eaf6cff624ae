"""The batched codec's pass with plain operators in place of its kernels: streams sound as the plain decoder's. And
what is compiled before a first pass.

The kernels themselves need a device: test_cuda_codec.py, test_codec_products.py.
"""

from __future__ import annotations

import contextlib
import random
import sys
from functools import partial
from types import SimpleNamespace

import codec_kernel_stand_ins
import pytest
import torch
from torch import Tensor

from mktts.batch.cuda.codec import CudaCodec
from mktts.batch.cuda.kernels.launching import compiling, launch
from mktts.codec.decoder import CodecDecoder
from mktts.errors import BackendUnavailable, CodecError
from mktts.measure.parity.codec import random_codes, snr_db

LEAST_SNR_DB = {"full": 100.0, "fast": 50.0}
SLOTS = 4


@pytest.fixture(scope="module")
def plain(tiny) -> partial[CodecDecoder]:
    return partial(CodecDecoder, tiny.codec_config, tiny.codec_tensors())


@pytest.fixture(scope="module", params=LEAST_SNR_DB)
def codec(request, plain) -> CudaCodec:
    made = CudaCodec(plain, SLOTS, request.param, (codec_kernel_stand_ins.PRODUCTS, codec_kernel_stand_ins.ROWS))
    made.least_db = LEAST_SNR_DB[request.param]
    return made


def decoded(codec: CudaCodec, codes: list[Tensor], slots: list[int], lanes: int = SLOTS) -> Tensor:
    """The next frame of `slots`, in a pass of `lanes` lanes, of which those that are left are padded."""
    frame = torch.full((lanes, 16), 2_150, dtype=torch.int32)
    frame[: len(slots)] = torch.stack(codes)
    nobody = [SLOTS - 1] * (lanes - len(slots))
    return codec.decode(frame, torch.tensor(slots + nobody, dtype=torch.int32))[: len(slots)]


def test_streams_that_come_and_go_sound_as_alone(codec, plain):
    """Past the attention window, at different positions, in slots that others had before; one goes on from a state."""
    decoder, chance, frames = plain(), random.Random(0), 15
    codes = [random_codes(frames, seed=seed) for seed in range(5)]
    primed = decoder.start()
    decoder.decode(codes[1][:13], primed)
    waiting, free, slots = list(range(5)), [0, 1, 2], {}
    made: dict[int, list[Tensor]] = {i: [] for i in waiting}
    heard = {i: 13 if i == 1 else 0 for i in waiting}
    while waiting or slots:
        while waiting and free:
            stream, slot = waiting.pop(0), free.pop()
            slots[stream] = slot
            codec.enter(slot, primed if stream == 1 else None)
        going = [i for i in slots if chance.random() < 0.7]
        if not going:
            continue
        frame = [codes[i][heard[i] + len(made[i])] for i in going]
        for i, pcm in zip(going, decoded(codec, frame, [slots[i] for i in going]), strict=True):
            made[i].append(pcm)
            if heard[i] + len(made[i]) == frames:
                free.append(slots.pop(i))
    for i, pcm in made.items():
        expected = decoder.decode_all(codes[i])[heard[i] * 1920 :]
        assert snr_db(torch.cat(pcm), expected) > codec.least_db, i


def test_sizes_are_known_before_a_stream_comes(codec):
    state = codec._states
    slot = (state.histories[0], state.keys[0], state.values[0], state.positions[0])
    assert codec.state_bytes == sum(tensor.nbytes for tensor in slot)
    assert codec.name in ("fused", "fused-fast")


def test_codes_and_lanes_of_other_kinds_are_refused(codec):
    lanes, codes = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 16, dtype=torch.int32)
    for wrong in ((codes.long(), lanes), (codes, lanes.long()), (codes[:1], lanes), (codes[:, :4], lanes)):
        with pytest.raises(CodecError, match="int32"):
            codec.decode(*wrong)


def test_without_a_gpu_the_kernels_are_refused_by_name(plain):
    with pytest.raises(BackendUnavailable, match="the batched codec needs"):
        CudaCodec(plain, SLOTS, "full")


# ---- what is compiled


class Asked:
    """A kernel that is to compile, and must not run. times: so often was it asked to."""

    times = 0

    def warmup(self, *_args: object, grid: tuple[int, ...], **_options: object) -> None:
        self.times += 1


@pytest.fixture
def without_triton(monkeypatch):
    mode = SimpleNamespace(AsyncCompileMode=lambda executor: contextlib.nullcontext())
    for name, module in (("triton", SimpleNamespace()), ("triton.runtime", SimpleNamespace(_async_compile=mode))):
        monkeypatch.setitem(sys.modules, name, module)


def test_a_binary_is_asked_for_once_however_many_buckets_and_layers_launch_it(without_triton):
    kernel, rows = Asked(), torch.zeros(64)
    with compiling(1):
        for count in (48, 64, 1_024):
            for layer in (rows[:16], rows[16:32], torch.zeros(2, 2)):
                launch(kernel, (count,), layer, 1e-6, count, None, N=16, SPLIT=True, num_warps=4)
    assert kernel.times == 1
    with compiling(1):  # another time, perhaps on another device
        launch(kernel, (1,), rows, 1e-6, 48, None, N=16, SPLIT=True, num_warps=4)
    assert kernel.times == 2


def test_whatever_triton_compiles_apart_is_asked_for_apart(without_triton):
    """Triton's rules: an argument's dtype, 16-byte alignment, 1, divisibility by 16, 64 bits, None, and constants."""
    kernel, rows = Asked(), torch.zeros(64)

    def described(dtype: torch.dtype, *block: int) -> SimpleNamespace:
        return SimpleNamespace(base=torch.zeros(16, dtype=dtype), block_shape=list(block), padding="zero")

    apart = [
        ((rows, 16), {"N": 16}),
        ((rows.half(), 16), {"N": 16}),
        ((rows[1:], 16), {"N": 16}),
        ((None, 16), {"N": 16}),
        ((described(torch.half, 16, 64), 16), {"N": 16}),
        ((described(torch.half, 16, 32), 16), {"N": 16}),
        ((described(torch.bfloat16, 16, 32), 16), {"N": 16}),
        ((rows, 17), {"N": 16}),
        ((rows, 1), {"N": 16}),
        ((rows, True), {"N": 16}),
        ((rows, 2**40), {"N": 16}),
        ((rows, 16), {"N": 32}),
        ((rows, 16), {"N": 1}),
        ((rows, 16), {"N": True}),
        ((rows, 16), {"N": 16, "num_warps": 8}),
    ]
    with compiling(1):
        for times, (args, options) in enumerate(apart, 1):
            for _ in range(2):
                launch(kernel, (1,), *args, **options)
            assert kernel.times == times, (args, options)


def test_kernels_of_one_shape_are_asked_for_each(without_triton):
    kernels = [Asked(), Asked()]
    with compiling(1):
        for kernel in kernels:
            launch(kernel, (1,), torch.zeros(4), N=16)
    assert [kernel.times for kernel in kernels] == [1, 1]
