"""A launcher without a GPU: stand-ins take launches as the driver would, and write what a kernel would."""

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from mktts.kernel import launch
from mktts.kernel.backend import MegakernelBackend
from mktts.kernel.grid import Shape
from mktts.kernel.launch import ENDED, FRAME_WORDS, MADE, STATUS_WORDS, Params
from mktts.spec import ModelConfig

HERE, ELSEWHERE = torch.device("cpu"), torch.device("meta")  # in the place of the model's GPU and of another
FUNCTION = ctypes.c_void_p(7)  # of the kernel


@dataclass
class StandIn:
    """The driver. Takes launches down as (grid, block, shared bytes, stream, the parameters' bytes)."""

    status: int = 0
    makes: int | None = None  # frames that a launch makes; None: all that are asked for
    ends: bool = False  # whether speech ends after them
    current: torch.device = ELSEWHERE
    stream: int = 5
    launched: list[tuple] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)  # the current one, a launch each

    @property
    def params(self) -> list[Params]:
        """What every launch was given, as it was then."""
        return [Params.from_buffer_copy(launched[-1]) for launched in self.launched]

    def cuLaunchCooperativeKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, arguments):
        parameters = ctypes.string_at(arguments[0], ctypes.sizeof(Params))
        self.launched.append(((gx, gy, gz), (bx, by, bz), shared, stream.value, parameters))
        self.devices.append(self.current)
        params = Params.from_buffer_copy(parameters)
        if not self.status and not params.prefill and params.stream.out:
            self._make(params)
        return self.status

    def cuGetErrorString(self, status, text):
        text._obj.value = b"too many blocks"

    def _make(self, params: Params) -> None:
        made = params.frames if self.makes is None else self.makes
        words = (ctypes.c_int * (STATUS_WORDS + params.frames * FRAME_WORDS)).from_address(params.stream.out)
        for index in range(made):
            first = STATUS_WORDS + index * FRAME_WORDS
            words[first : first + 18] = [*range(params.stream.frame + index, params.stream.frame + index + 16), 2, 1]
        words[MADE], words[ENDED] = made, self.ends


class Event:
    """torch.cuda.Event as far as launches use it; what it waits for is always over."""

    def __init__(self) -> None:
        self.recorded, self.waits = [], 0

    def record(self, stream) -> None:
        self.recorded.append(stream.cuda_stream)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.waits += 1


def put_stand_in(patch: pytest.MonkeyPatch, status: int = 0) -> StandIn:
    """In the place of the driver, and of what launching takes of torch.cuda."""
    stand_in = StandIn(status)

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            self.before, stand_in.current = stand_in.current, self.device

        def __exit__(self, *_: object) -> None:
            stand_in.current = self.before

    patch.setattr(launch, "_driver", lambda: stand_in)
    patch.setattr("mktts.kernel.backend.pinned_words", lambda frames: torch.zeros(1_000, dtype=torch.int32))
    patch.setattr(torch.cuda, "device", Guard)
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=stand_in.stream))
    return stand_in


def launcher_without_a_card(patch: pytest.MonkeyPatch) -> launch.Launcher:
    """After `put_stand_in`: 128 blocks of 384 threads, 200 000 bytes shared."""
    constants = {"layer_exchanges": 5, "threads": 384, "shared_bytes": 200_000, "exchange_bytes": 256}
    patch.setattr(launch, "build_for", lambda *_: SimpleNamespace(image=b"", constants=constants))
    patch.setattr(launch.Kernel, "__init__", lambda kernel, image, name: setattr(kernel, "_function", FUNCTION))
    patch.setattr(launch.Launcher, "_check_residence", lambda launcher: None)
    return launch.Launcher("frame.cu", "mktts_frames", {"CTAS": 128}, HERE, None)


def backend_without_a_card(
    config: ModelConfig, shape: Shape, launcher: launch.Launcher, weights: dict[str, torch.Tensor], tags_per_frame: int
) -> MegakernelBackend:
    backend = object.__new__(MegakernelBackend)
    backend.config, backend.device, backend.dtype = config, HERE, torch.bfloat16
    backend._launcher, backend._tags_per_frame, backend.shape = launcher, tags_per_frame, shape
    backend._weights = weights
    backend._fixed = backend._fixed_params()
    return backend
