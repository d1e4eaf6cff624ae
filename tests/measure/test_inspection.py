"""The component table against the published sizes and the frame's arithmetic."""

import pytest

from mktts.checkpoint import Checkpoint
from mktts.measure import inspection


@pytest.mark.parametrize(
    ("size", "talker_bytes", "projection_bytes", "width", "published_gb"),
    [
        ("0.6b", 880_932_864 + 2_048 + 6_291_456, 0, 1024, 3.31),
        ("1.7b", 2_818_816_000 + 4_096 + 12_582_912, 4_196_352, 2048, 5.32),
    ],
)
def test_bytes_per_frame_are_the_sum_of_what_a_frame_reads(size, talker_bytes, projection_bytes, width, published_gb):
    rows = inspection.components_at(size)
    predictor_layers, heads, embedding_row = 157_309_440 + 2_048, 62_914_560, 2 * width
    want = talker_bytes + 15 * (predictor_layers + projection_bytes) + heads + 16 * embedding_row
    assert inspection.bytes_per_frame(rows) == want
    assert round(want / 1e9, 2) == published_gb


def test_every_tensor_is_in_exactly_one_component(tiny_base: Checkpoint) -> None:
    rows = inspection.components(tiny_base)
    files = [tiny_base.folder / "model.safetensors", tiny_base.folder / "speech_tokenizer" / "model.safetensors"]
    assert sum(row.tensors for row in rows) == len(tiny_base.files.tensors) + len(tiny_base.codec_files.tensors)
    assert 0 < sum(f.stat().st_size for f in files) - sum(row.bytes for row in rows) < 100_000  # the headers
    names = [row.name for row in rows]
    assert len(set(names)) == len(names) and "speaker_encoder" in names and "small_to_mtp_projection" not in names


def test_the_codec_reads_its_decoder_and_sixteen_rows(tiny: Checkpoint) -> None:
    rows = {row.name: row for row in inspection.components(tiny)}
    decoder = sum(t.nbytes for name, t in tiny.codec_tensors().items() if ".vq." not in name)
    row_bytes = tiny.codec_config.codebook_dim // 2 * 4
    assert rows["codec decoder"].bytes_per_frame == decoder
    assert rows["codec codebooks"].bytes_per_frame == 16 * row_bytes
    assert rows["codec encoder"].bytes_per_frame == rows["text_embedding"].bytes_per_frame == 0


def test_a_size_without_weights_has_the_same_components_as_with_them(tiny: Checkpoint) -> None:
    both = (inspection.components_at("tiny"), inspection.components(tiny))
    plain, made = ([row for row in rows if not row.name.startswith(("codec ", "text_emb"))] for rows in both)
    assert plain == made
