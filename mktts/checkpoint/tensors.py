"""The shape contract: every tensor of a Qwen3-TTS 12 Hz checkpoint, derived from its configuration. Names and shapes
are those that the model classes of qwen-tts 0.1.1 load."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mktts.errors import CheckpointError
from mktts.spec import NUM_CODEBOOKS, ModelConfig, StackConfig

DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
WEIGHT_DTYPES = ("BF16", "F32")

Shape = tuple[int, ...]

# Speaker encoder (ECAPA-TDNN): config.json has its output width only; these are the defaults of upstream's class.
SPEAKER_MELS = 128
SPEAKER_CHANNELS = (512, 512, 512, 512, 1536)
SPEAKER_KERNELS = (5, 3, 3, 3, 1)
SPEAKER_ATTENTION_CHANNELS = 128
SPEAKER_RES2NET_SCALE = 8
SPEAKER_SE_CHANNELS = 128


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor, as expected (any of WEIGHT_DTYPES) or as found in a file's header."""

    shape: Shape
    dtype: str = WEIGHT_DTYPES[0]

    @property
    def params(self) -> int:
        return math.prod(self.shape)

    def nbytes(self) -> int:
        return self.params * DTYPE_BYTES[self.dtype]


TensorSpecs = dict[str, TensorSpec]


def expected_tensors(config: ModelConfig) -> TensorSpecs:
    """The tensors of `model.safetensors`: talker, code predictor and, for Base, the speaker encoder."""
    talker, predictor = config.talker, config.predictor
    h, text = talker.hidden_size, config.text_hidden_size
    shapes: dict[str, Shape] = {
        "talker.model.codec_embedding.weight": (talker.vocab_size, h),
        "talker.model.text_embedding.weight": (config.text_vocab_size, text),
        "talker.text_projection.linear_fc1.weight": (text, text),
        "talker.text_projection.linear_fc1.bias": (text,),
        "talker.text_projection.linear_fc2.weight": (h, text),
        "talker.text_projection.linear_fc2.bias": (h,),
        "talker.codec_head.weight": (talker.vocab_size, h),
    }
    shapes |= stack_shapes("talker.model.", talker)
    shapes |= stack_shapes("talker.code_predictor.model.", predictor)
    for group in range(NUM_CODEBOOKS - 1):
        # embeddings have the talker's width, because they are also summed into its next input
        shapes[f"talker.code_predictor.model.codec_embedding.{group}.weight"] = (predictor.vocab_size, h)
        shapes[f"talker.code_predictor.lm_head.{group}.weight"] = (predictor.vocab_size, predictor.hidden_size)
    if h != predictor.hidden_size:
        shapes["talker.code_predictor.small_to_mtp_projection.weight"] = (predictor.hidden_size, h)
        shapes["talker.code_predictor.small_to_mtp_projection.bias"] = (predictor.hidden_size,)
    if config.speaker_embedding_size is not None:
        shapes |= dict(_speaker_encoder(config.speaker_embedding_size))
    return tensor_specs(shapes)


def expected_codec_tensors(raw: Mapping[str, Any], encoder: bool = True) -> TensorSpecs:
    """The tensors of `speech_tokenizer/model.safetensors`. raw: the parsed config.json beside it. encoder: whether to
    include the encoder of reference audio. Raises CheckpointError naming a missing configuration key."""
    try:
        shapes = dict(_codec_encoder(raw["encoder_config"])) if encoder else {}
        shapes |= dict(_codec_decoder(raw["decoder_config"]))
    except (KeyError, TypeError) as error:
        lacks = f"expected the 12 Hz keys, found none for {error}"
        raise CheckpointError(f"speech_tokenizer/config.json: {lacks}") from None
    return tensor_specs(shapes)


def check(found: Mapping[str, TensorSpec], expected: TensorSpecs, where: str) -> None:
    """Compares a file's tensors with the contract. Raises one CheckpointError naming the first tensor that does not fit
    (wrong shapes, then dtypes, missing, surplus), what was expected and found, and the number of further problems."""
    both = [(name, spec, found[name]) for name, spec in expected.items() if name in found]
    problems = [f"{n}: expected shape {s.shape}, found {its.shape}" for n, s, its in both if its.shape != s.shape]
    odd = [(n, its.dtype) for n, _, its in both if its.dtype not in WEIGHT_DTYPES]
    problems += [f"{n}: expected dtype {' or '.join(WEIGHT_DTYPES)}, found {dtype}" for n, dtype in odd]
    problems += [f"{n}: expected shape {s.shape}, found no such tensor" for n, s in expected.items() if n not in found]
    surplus = [(n, its.shape) for n, its in found.items() if n not in expected]
    problems += [f"{n}: expected no such tensor for this configuration, found shape {shape}" for n, shape in surplus]
    if problems:
        more = f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else ""
        first = f"tensor {problems[0]}{more}. Expected {len(expected)} tensors, found {len(found)}"
        hint = "The weights do not belong to this config.json; download both again."
        raise CheckpointError(f"{where}: {first}. {hint}")


def tensor_specs(shapes: Mapping[str, Shape]) -> TensorSpecs:
    return {name: TensorSpec(shape) for name, shape in shapes.items()}


def stack_shapes(prefix: str, c: StackConfig) -> dict[str, Shape]:
    """One Qwen3 decoder stack: grouped-query attention with q/k norms, SwiGLU, no biases."""
    shapes: dict[str, Shape] = {prefix + "norm.weight": (c.hidden_size,)}
    for i in range(c.num_hidden_layers):
        layer = f"{prefix}layers.{i}."
        shapes |= dict(_decoder_layer(layer, vars(c)))
        shapes |= {layer + f"self_attn.{kind}_norm.weight": (c.head_dim,) for kind in "qk"}
    return shapes


def _attention(layer: str, c: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, q, kv = c["hidden_size"], *(c[f"num_{of}_heads"] * c["head_dim"] for of in ("attention", "key_value"))
    for kind, shape in (("q", (q, hidden)), ("k", (kv, hidden)), ("v", (kv, hidden)), ("o", (hidden, q))):
        yield f"{layer}self_attn.{kind}_proj.weight", shape


def _decoder_layer(layer: str, c: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """One layer: attention, SwiGLU, and the norms before them."""
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    yield from _attention(layer, c)
    for norm in ("input", "post_attention"):
        yield f"{layer}{norm}_layernorm.weight", (hidden,)
    for kind, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        yield f"{layer}mlp.{kind}_proj.weight", shape


def conv(name: str, *shape: int, channels: int | None = None) -> Iterator[tuple[str, Shape]]:
    """Weight and bias of a convolution. channels: length of the bias; None: the first dimension of the weight."""
    yield name + ".weight", shape
    yield name + ".bias", (channels or shape[0],)


def _speaker_encoder(enc_dim: int) -> Iterator[tuple[str, Shape]]:
    root = "speaker_encoder."
    first, *blocks, last = SPEAKER_CHANNELS
    yield from conv(root + "blocks.0.conv", first, SPEAKER_MELS, SPEAKER_KERNELS[0])
    width = first
    for i, channels in enumerate(blocks, start=1):
        block, part = f"{root}blocks.{i}.", channels // SPEAKER_RES2NET_SCALE
        yield from conv(block + "tdnn1.conv", channels, width, 1)
        for j in range(SPEAKER_RES2NET_SCALE - 1):
            yield from conv(f"{block}res2net_block.blocks.{j}.conv", part, part, SPEAKER_KERNELS[i])
        yield from conv(block + "tdnn2.conv", channels, channels, 1)
        yield from conv(block + "se_block.conv1", SPEAKER_SE_CHANNELS, channels, 1)
        yield from conv(block + "se_block.conv2", channels, SPEAKER_SE_CHANNELS, 1)
        width = channels
    yield from conv(root + "mfa.conv", last, sum(blocks), SPEAKER_KERNELS[-1])
    yield from conv(root + "asp.tdnn.conv", SPEAKER_ATTENTION_CHANNELS, 3 * last, 1)
    yield from conv(root + "asp.conv", last, SPEAKER_ATTENTION_CHANNELS, 1)
    yield from conv(root + "fc", enc_dim, 2 * last, 1)


def _codec_encoder(c: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """The encoder of a Mimi codec (transformers MimiModel); the skipped indices belong to ELU modules."""
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
    for i in range(c["num_hidden_layers"]):
        layer = f"encoder.encoder_transformer.layers.{i}."
        yield from conv(layer + "input_layernorm", hidden)
        yield from _attention(layer, c)
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
    for i in range(c["num_hidden_layers"]):
        layer = f"decoder.pre_transformer.layers.{i}."
        yield from _decoder_layer(layer, c)
        yield layer + "self_attn_layer_scale.scale", (hidden,)
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
