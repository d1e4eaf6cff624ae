"""The number of thread blocks of a kernel, and the rows of a matrix assigned to each: csrc/config.cuh in Python. The
blocks form one group for each key-value head. If a group's rows do not divide evenly over its blocks, every block takes
the rounded-up number and the last ones have fewer."""

from dataclasses import dataclass, replace

from mktts.errors import BackendUnavailable
from mktts.spec import NUM_CODEBOOKS, ModelConfig, StackConfig

# The same constants as in the kernel (tests/kernel/test_build.py).
WARPS = 8  # of a block that multiply
FRAGMENTS = 4  # that a warp takes from one ring stage
EPS = 1e-6  # of every RMSNorm
TILE_ROWS = 2 * WARPS  # a block's rows are padded to whole tiles: two rows for each warp
WARP_ROWS = 32  # most rows of one matrix for a warp: one for each lane
MOST_ROWS = 8 * TILE_ROWS  # most rows that a block multiplies at once
_MOST_GROUP = 32  # most blocks of a group: one for each lane
_MOST_HEAD_DIM = 128


@dataclass(frozen=True)
class Dealt:
    """csrc/config.cuh, struct Dealt: `total` rows of `inputs` columns distributed over a group, in units of `unit`."""

    total: int
    inputs: int
    group: int
    unit: int = 1

    @property
    def each(self) -> int:
        """Consecutive rows of each block; the last blocks may have fewer, or none."""
        return self.unit * -(-(self.total // self.unit) // self.group)

    @property
    def count(self) -> int:
        """The number of consecutive matrices that a block's rows form."""
        return -(-self.each // self.chunk)

    @property
    def chunk(self) -> int:
        """Rows of one of these matrices, padded to whole tiles."""
        if self.each <= MOST_ROWS:
            return TILE_ROWS * -(-self.each // TILE_ROWS)
        return min(range(MOST_ROWS // 2, MOST_ROWS + 1, TILE_ROWS), key=lambda rows: rows * -(-self.each // rows))

    @property
    def elements(self) -> int:
        """Values on a block's tape, including padding."""
        return self.count * self.chunk * 128 * -(-self.inputs // 128)


def layer_matrices(stack: StackConfig, group: int) -> dict[str, Dealt]:
    """A group's part of a layer's matrices in the order of their use, by csrc's names in lower case."""
    heads, h = stack.num_key_value_heads, stack.hidden_size
    outputs, inner = stack.num_attention_heads // heads * stack.head_dim, stack.intermediate_size // heads
    return {
        "qkv": Dealt(outputs + 2 * stack.head_dim, h, group),
        "out": Dealt(h, outputs, group),
        "gate_up": Dealt(2 * inner, h, group, unit=2),
        "down": Dealt(h, inner, group),
    }


@dataclass(frozen=True)
class Shape:
    """The dimensions that the kernel is compiled for."""

    talker: StackConfig
    predictor: StackConfig
    blocks: int

    @property
    def group(self) -> int:
        """Blocks that share one key-value head."""
        return self.blocks // self.talker.num_key_value_heads

    def cache(self, positions: int) -> tuple[int, ...]:
        """Dimensions of the talker's keys and values: (layers, kv heads, group, slots, 2, head_dim)."""
        t, slots = self.talker, -(-positions // self.group) + 1
        return t.num_hidden_layers, t.num_key_value_heads, self.group, slots, 2, t.head_dim

    @property
    def defines(self) -> dict[str, int]:
        t, p = self.talker, self.predictor
        defines = {"NQ": t.num_attention_heads, "NKV": t.num_key_value_heads, "HD": t.head_dim, "CTAS": self.blocks}
        for name, stack in (("T", t), ("P", p)):
            defines |= {
                f"{name}_H": stack.hidden_size,
                f"{name}_F": stack.intermediate_size,
                f"{name}_L": stack.num_hidden_layers,
                f"{name}_VOCAB": stack.vocab_size,
            }
        return defines


def choose_shape(config: ModelConfig, multiprocessors: int) -> Shape:
    """Chooses the widest power of two, which needs least padding, or a wider grid of lower `_cost`. Raises
    BackendUnavailable if no grid fits the checkpoint, or if those that do are too large for the GPU."""
    t, p = config.talker, config.predictor
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        if getattr(t, name) != getattr(p, name):
            raise BackendUnavailable(f"the megakernel needs talker and predictor with the same {name}")
    return _best(t, p, multiprocessors, head_rows=max(t.vocab_size, p.vocab_size))


def choose_text_shape(stack: StackConfig, multiprocessors: int) -> Shape:
    """Chooses the shape for a text model, with the smallest predictor that compiles as a placeholder."""
    return _best(stack, replace(stack, num_hidden_layers=1, vocab_size=16), multiprocessors, head_rows=0)


def _best(t: StackConfig, p: StackConfig, multiprocessors: int, head_rows: int) -> Shape:
    if (t.rms_norm_eps, p.rms_norm_eps) != (EPS, EPS):
        raise BackendUnavailable(f"the megakernel is built for rms_norm_eps {EPS}")
    shapes = [Shape(t, p, t.num_key_value_heads * group) for group in range(1, _MOST_GROUP + 1)]
    misfits = [_misfit(shape, head_rows) for shape in shapes]
    fitting = [shape for shape, misfit in zip(shapes, misfits, strict=True) if misfit is None]
    if not fitting:
        inner = f"feed-forward {t.intermediate_size} and {p.intermediate_size}: {misfits[-1]}: pass backend='torch'"
        sizes = f"hidden sizes {t.hidden_size} and {p.hidden_size}, {inner}"
        raise BackendUnavailable(f"no grid of the megakernel fits {sizes}")
    held = [shape for shape in fitting if shape.blocks <= multiprocessors]
    if not held:
        least = fitting[0].blocks
        has = f"this GPU has {multiprocessors}, {least - multiprocessors} too few: pass backend='torch'"
        raise BackendUnavailable(f"the megakernel needs {least} multiprocessors for this checkpoint, {has}")
    even = [shape.blocks for shape in held if shape.blocks.bit_count() == 1]
    wider = [shape for shape in held if shape.blocks >= max(even, default=0)]
    return min(wider, key=lambda shape: _cost(shape, multiprocessors))


def _cost(shape: Shape, multiprocessors: int) -> float:
    """An estimate of a frame's time: the values that one block reads plus, as the load on the memory, the values that
    all blocks read per multiprocessor. A wider grid lowers the first term and, by padding, may raise the second."""
    elements = 0
    for stack, times in ((shape.talker, 1), (shape.predictor, NUM_CODEBOOKS - 1)):
        layer = sum(matrix.elements for matrix in layer_matrices(stack, shape.group).values())
        elements += times * stack.num_hidden_layers * layer
    return elements * (1 + shape.blocks / multiprocessors)


def _misfit(shape: Shape, head_rows: int) -> str | None:
    """The reason why this grid is impossible, or None; the same conditions as csrc's static_asserts."""
    t, heads, blocks = shape.talker, shape.talker.num_key_value_heads, shape.blocks
    queries = t.num_attention_heads // heads
    if t.head_dim % 32 or t.head_dim > _MOST_HEAD_DIM or WARPS % queries or queries + 2 > WARPS:
        return f"{queries} query heads a key-value head, {t.head_dim} wide, do not map onto {WARPS} warps"
    if t.head_dim % (share := power_of_two(-(-queries * t.head_dim // shape.group))):
        return f"a block would finish {share} attention outputs, of heads {t.head_dim} wide"
    if head_rows > WARP_ROWS * WARPS * blocks:
        return f"a head of {head_rows} rows needs {-(-head_rows // (WARP_ROWS * WARPS))} blocks"
    for stack in (t, shape.predictor):
        h, f = stack.hidden_size, stack.intermediate_size
        if f % (4 * heads):
            return f"a feed-forward of {f} does not divide by four times {heads} key-value heads"
        if h % 4 or h < 4 * blocks:  # words are read in fours; more blocks would wait longer than they multiply
            return f"a hidden size of {h} does not divide over {blocks} blocks into four rows or more"
        for name, dealt in layer_matrices(stack, shape.group).items():
            if (shape.group - 1) * dealt.each >= dealt.total:  # a block without rows could not signal that it has read
                return f"the last of {shape.group} blocks would have none of the {dealt.total} rows of {name}"
    return None


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least` (1 or more)."""
    return 1 << (least - 1).bit_length()
