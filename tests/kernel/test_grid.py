"""Grids of any size: how many blocks there are, and which rows each is dealt."""

from dataclasses import replace

import pytest

from mktts.errors import BackendUnavailable
from mktts.kernel.grid import choose_shape, choose_text_shape, layer_matrices
from mktts.measure.inspection import config_at


# Multiprocessors -> blocks; H100 and H200 have 132.
@pytest.mark.parametrize(
    ("multiprocessors", "blocks"),
    [(16, 16), (20, 16), (24, 24), (28, 24), (46, 40), (48, 48), (58, 56), (76, 64), (84, 80), (108, 104), (128, 128)]
    + [(132, 128), (142, 128), (148, 128), (170, 128), (188, 128)],
)
@pytest.mark.parametrize("size", ["0.6b", "1.7b"])
def test_the_grid_leaves_few_multiprocessors_idle_unless_more_would_only_read_more(size, multiprocessors, blocks):
    assert choose_shape(config_at(size), multiprocessors).blocks == blocks
    assert 2 * min(multiprocessors, 170) <= 3 * blocks  # not a third idle


def test_no_block_of_a_grid_is_without_rows():
    """Who reads a buffer is known to have read it by what it sends next: a block that sends nothing is not known."""
    stack = replace(config_at("tiny").talker, hidden_size=256, head_dim=64)
    few = replace(stack, intermediate_size=2 * 4 * 11)  # 44 pairs over 16 blocks: 3 each, and none for the last
    assert all(
        (shape.group - 1) * dealt.each < dealt.total
        for multiprocessors in range(8, 130)
        for shape in [choose_text_shape(few, multiprocessors)]
        for dealt in layer_matrices(few, shape.group).values()
    )
    assert choose_text_shape(few, 32).group != 16


@pytest.mark.parametrize(
    ("multiprocessors", "changes", "said"),
    [
        (4, {}, "needs 16 multiprocessors .* has 4, 12 too few"),
        (132, {"hidden_size": 1_022}, "hidden size of 1022"),
        (132, {"intermediate_size": 3_080}, "feed-forward of 3080"),
        (132, {"head_dim": 80}, "80 wide"),
        (132, {"num_attention_heads": 64}, "8 query heads"),
    ],
)
def test_a_device_too_small_and_dimensions_that_fit_no_grid_are_named(multiprocessors, changes, said):
    with pytest.raises(BackendUnavailable, match=said):
        choose_text_shape(replace(config_at("0.6b").talker, **changes), multiprocessors)
