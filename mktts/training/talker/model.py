"""Talker and code predictor to train: whole sequences at once, with the Hub's parameter names.

The arithmetic is that of `mktts.model.qwen3` and `mktts.model.oracle`, which go row by row; both give the same logits
(tests/training/test_training_talker.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mktts.model.qwen3 import inverse_frequency, rotate
from mktts.spec import NUM_CODEBOOKS, ModelConfig, StackConfig

_INIT_STD = 0.02


class Norm(nn.RMSNorm):
    """The fused kernel wants weights of the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention with q/k norms. Right padding needs no mask: nothing before it sees it."""

    def __init__(self, c: StackConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = Norm(c.head_dim, c.rms_norm_eps)
        self.k_norm = Norm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, T, H) -> (B, T, H)."""
        shape = (*x.shape[:2], -1, self.head_dim)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        q, k = self.q_norm(self.q_proj(x).view(shape)), self.k_norm(self.k_proj(x).view(shape))
        q, k = (rotate(part.transpose(1, 2).to(v.dtype), cos.to(v.dtype), sin.to(v.dtype)) for part in (q, k))
        # repeated by hand: the fused kernels take equal head counts on every torch version
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, c: StackConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: StackConfig, dropout: float) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mlp(c)
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class TrainableStack(nn.Module):
    """Decoder layers and the final norm."""

    def __init__(self, c: StackConfig, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(c, dropout) for _ in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.register_buffer("frequency", inverse_frequency(c.head_dim, c.rope_theta), persistent=False)

    def run(self, x: Tensor) -> Tensor:
        """(B, T, H) from position 0 -> normed hidden states (B, T, H)."""
        angle = torch.outer(torch.arange(x.shape[1], device=x.device).float(), self.frequency)
        angle = torch.cat((angle, angle), -1)
        cos, sin = angle.cos(), angle.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class TextProjection(nn.Module):
    def __init__(self, text: int, hidden: int) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(text, text), nn.Linear(text, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.silu(self.linear_fc1(x)))


class Predictor(nn.Module):
    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        c, wide = config.predictor, config.talker.hidden_size
        self.model = TrainableStack(c, dropout)
        tables = (nn.Embedding(c.vocab_size, wide) for _ in range(NUM_CODEBOOKS - 1))
        self.model.codec_embedding = nn.ModuleList(tables)
        heads = (nn.Linear(c.hidden_size, c.vocab_size, bias=False) for _ in range(NUM_CODEBOOKS - 1))
        self.lm_head = nn.ModuleList(heads)
        if wide != c.hidden_size:
            self.small_to_mtp_projection = nn.Linear(wide, c.hidden_size)


class Talker(nn.Module):
    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        c = config.talker
        self.model = TrainableStack(c, dropout)
        self.model.codec_embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.model.text_embedding = nn.Embedding(config.text_vocab_size, config.text_hidden_size)
        self.text_projection = TextProjection(config.text_hidden_size, c.hidden_size)
        self.codec_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.code_predictor = Predictor(config, dropout)


class TalkerModel(nn.Module):
    """`state_dict()` is exactly the tensors of model.safetensors."""

    def __init__(self, config: ModelConfig, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.codebook_size = config.predictor.vocab_size
        self.talker = Talker(config, dropout)
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if "norm" not in name:
                nn.init.zeros_(p) if p.dim() == 1 else nn.init.normal_(p, 0, _INIT_STD, generator=generator)
        # The text side passes two more layers than codes do: at the common scale it would start 1 000 times quieter.
        t = self.talker
        nn.init.normal_(t.model.text_embedding.weight, 0, 1, generator=generator)
        for linear in (t.text_projection.linear_fc1, t.text_projection.linear_fc2):
            std = linear.in_features**-0.5 * (0.2 if linear is t.text_projection.linear_fc2 else 1)
            nn.init.normal_(linear.weight, 0, std, generator=generator)

    def code_rows(self, codes: Tensor) -> Tensor:
        """Sum of the sixteen embeddings: codes (N, 16), -1 for none, -> (N, H).

        As one product with a row of zeros and ones: gradients of sixteen look-ups would be sorted sixteen times.
        """
        tables = torch.cat([table[: self.codebook_size] for table in self._tables()])
        index = torch.where(codes >= 0, codes + self._offsets(codes), len(tables))
        chosen = torch.zeros(len(codes), len(tables) + 1, dtype=tables.dtype, device=codes.device)
        return chosen.scatter_(1, index, 1.0)[:, :-1] @ tables

    def hidden(self, text: Tensor, control: Tensor, previous: Tensor) -> Tensor:
        """Normed hidden states (B, T, H) of whole sequences.

        text (B, T): text id of every row. control (B, T): codec id, or -1 for none. previous (B, T, 16): the frame that
        the row carries, or -1 for none.
        """
        x = self.talker.text_projection(self.talker.model.text_embedding(text))
        control_rows = self.talker.model.codec_embedding(control.clamp(min=0))
        x = x + control_rows * (control >= 0).unsqueeze(-1)
        return self.talker.model.run(x + self.code_rows(previous.flatten(0, 1)).view_as(x))

    def code0_logits(self, hidden: Tensor) -> Tensor:
        """(N, H) -> (N, talker vocabulary)."""
        return self.talker.codec_head(hidden)

    def predictor_logits(self, hidden: Tensor, codes: Tensor, books: int = NUM_CODEBOOKS - 1) -> Tensor:
        """Logits (N, books, codebook) of codes 1 to `books`, given the talker's hidden (N, H) and codes (N, 16)."""
        predictor = self.talker.code_predictor
        tables = torch.cat([table[: self.codebook_size] for table in self._tables()[:books]])
        known = F.embedding(codes[:, :books] + self._offsets(codes)[:books], tables)
        x = torch.cat((hidden.unsqueeze(1), known.to(hidden.dtype)), 1)
        if hasattr(predictor, "small_to_mtp_projection"):
            x = predictor.small_to_mtp_projection(x)
        rows = predictor.model.run(x)[:, 1:]
        heads = torch.stack([head.weight for head in predictor.lm_head[:books]])
        return torch.bmm(rows.transpose(0, 1), heads.transpose(1, 2).to(rows.dtype)).transpose(0, 1)

    def _tables(self) -> list[Tensor]:
        predictor = self.talker.code_predictor.model
        return [self.talker.model.codec_embedding.weight, *(table.weight for table in predictor.codec_embedding)]

    def _offsets(self, codes: Tensor) -> Tensor:
        return torch.arange(NUM_CODEBOOKS, device=codes.device) * self.codebook_size
