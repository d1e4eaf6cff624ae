"""The shape contract of the speech tokenizer: the codec decoder, and the encoder that makes reference codes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mktts.checkpoint.tensors import Shape, TensorSpecs, conv, tensor_specs
from mktts.errors import CheckpointError


def expected_codec_tensors(raw: Mapping[str, Any], encoder: bool = True) -> TensorSpecs:
    """The tensors of `speech_tokenizer/model.safetensors`; `raw` is the parsed `speech_tokenizer/config.json`.

    encoder: with the half that makes codes of reference audio; speaking needs none of it.
    Raises CheckpointError naming a configuration key that is missing.
    """
    try:
        shapes = dict(_codec_encoder(raw["encoder_config"])) if encoder else {}
        shapes |= dict(_codec_decoder(raw["decoder_config"]))
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"speech_tokenizer/config.json: expected the 12 Hz keys, found none for {error}"
        ) from None
    return tensor_specs(shapes)


def _codec_encoder(c: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """The encoder half of a Mimi codec (transformers MimiModel); ELU modules take the indices that are skipped."""
    root, width, index = "encoder.encoder.layers.", c["num_filters"], 1
    yield from conv(f"{root}0.conv", width, c["audio_channels"], c["kernel_size"])
    for ratio in reversed(c["upsampling_ratios"]):
        for _ in range(c["num_residual_layers"]):
            inner = width // c["compress"]
            yield from conv(f"{root}{index}.block.1.conv", inner, width, c["residual_kernel_size"])
            yield from conv(f"{root}{index}.block.3.conv", width, inner, 1)
            index += 1
        yield from conv(f"{root}{index + 1}.conv", 2 * width, width, 2 * ratio)
        width, index = 2 * width, index + 2
    hidden = c["hidden_size"]
    yield from conv(f"{root}{index + 1}.conv", hidden, width, c["last_kernel_size"])
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    for i in range(c["num_hidden_layers"]):
        layer = f"encoder.encoder_transformer.layers.{i}."
        yield from conv(layer + "input_layernorm", hidden)
        yield layer + "self_attn.q_proj.weight", (q, hidden)
        yield layer + "self_attn.k_proj.weight", (kv, hidden)
        yield layer + "self_attn.v_proj.weight", (kv, hidden)
        yield layer + "self_attn.o_proj.weight", (hidden, q)
        yield layer + "self_attn_layer_scale.scale", (hidden,)
        yield from conv(layer + "post_attention_layernorm", hidden)
        yield layer + "mlp.fc1.weight", (c["intermediate_size"], hidden)
        yield layer + "mlp.fc2.weight", (hidden, c["intermediate_size"])
        yield layer + "mlp_layer_scale.scale", (hidden,)
    conv_rate_hz = c["sampling_rate"] / math.prod(c["upsampling_ratios"])
    yield "encoder.downsample.conv.weight", (hidden, hidden, 2 * int(conv_rate_hz / c["_frame_rate"]))
    semantic = c["num_semantic_quantizers"]
    for kind, books in (("semantic", semantic), ("acoustic", c["num_quantizers"] - semantic)):
        rvq, inner = f"encoder.quantizer.{kind}_residual_vector_quantizer.", c["vector_quantization_hidden_dimension"]
        if inner != hidden:
            yield rvq + "input_proj.weight", (inner, hidden, 1)
            yield rvq + "output_proj.weight", (hidden, inner, 1)
        for i in range(books):
            yield f"{rvq}layers.{i}.codebook.initialized", (1,)
            yield f"{rvq}layers.{i}.codebook.cluster_usage", (c["codebook_size"],)
            yield f"{rvq}layers.{i}.codebook.embed_sum", (c["codebook_size"], c["codebook_dim"])


def _codec_decoder(c: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    latent, hidden, books = c["latent_dim"], c["hidden_size"], c["codebook_dim"]
    for kind, count in (("first", 1), ("rest", c["num_quantizers"] - 1)):
        rvq = f"decoder.quantizer.rvq_{kind}."
        yield rvq + "input_proj.weight", (books // 2, books, 1)
        yield rvq + "output_proj.weight", (books, books // 2, 1)
        for i in range(count):
            yield f"{rvq}vq.layers.{i}._codebook.cluster_usage", (c["codebook_size"],)
            yield f"{rvq}vq.layers.{i}._codebook.embedding_sum", (c["codebook_size"], books // 2)
    yield from conv("decoder.pre_conv.conv", latent, books, 3)
    yield from conv("decoder.pre_transformer.input_proj", hidden, latent)
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    for i in range(c["num_hidden_layers"]):
        layer = f"decoder.pre_transformer.layers.{i}."
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "self_attn.q_proj.weight", (q, hidden)
        yield layer + "self_attn.k_proj.weight", (kv, hidden)
        yield layer + "self_attn.v_proj.weight", (kv, hidden)
        yield layer + "self_attn.o_proj.weight", (hidden, q)
        yield layer + "self_attn_layer_scale.scale", (hidden,)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        yield layer + "mlp.gate_proj.weight", (c["intermediate_size"], hidden)
        yield layer + "mlp.up_proj.weight", (c["intermediate_size"], hidden)
        yield layer + "mlp.down_proj.weight", (hidden, c["intermediate_size"])
        yield layer + "mlp_layer_scale.scale", (hidden,)
    yield "decoder.pre_transformer.norm.weight", (hidden,)
    yield from conv("decoder.pre_transformer.output_proj", latent, hidden)
    for i, ratio in enumerate(c["upsampling_ratios"]):
        up = f"decoder.upsample.{i}."
        yield from conv(up + "0.conv", latent, latent, ratio)
        yield up + "1.gamma", (latent,)
        yield from conv(up + "1.dwconv.conv", latent, 1, 7)
        yield from conv(up + "1.norm", latent)
        yield from conv(up + "1.pwconv1", 4 * latent, latent)
        yield from conv(up + "1.pwconv2", latent, 4 * latent)
    width = c["decoder_dim"]
    yield from conv("decoder.decoder.0.conv", width, latent, 7)
    for i, rate in enumerate(c["upsample_rates"], start=1):
        block, out = f"decoder.decoder.{i}.block.", width // 2
        yield from _snake(block + "0", width)
        yield from conv(block + "1.conv", width, out, 2 * rate, channels=out)  # transposed: (in, out, kernel)
        for unit in (2, 3, 4):
            yield from _snake(f"{block}{unit}.act1", out)
            yield from conv(f"{block}{unit}.conv1.conv", out, out, 7)
            yield from _snake(f"{block}{unit}.act2", out)
            yield from conv(f"{block}{unit}.conv2.conv", out, out, 1)
        width = out
    last = len(c["upsample_rates"]) + 1
    yield from _snake(f"decoder.decoder.{last}", width)
    yield from conv(f"decoder.decoder.{last + 1}.conv", 1, width, 7)


def _snake(name: str, channels: int) -> Iterator[tuple[str, Shape]]:
    yield name + ".alpha", (channels,)
    yield name + ".beta", (channels,)
