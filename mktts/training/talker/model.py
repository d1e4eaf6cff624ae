"""Talker and code predictor to train: whole sequences at once, with the Hub's parameter names.

The arithmetic is that of `mktts.model.qwen3` and `mktts.model.oracle`, which go row by row; both give the same logits
(tests/training/test_training_talker.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mktts.checkpoint.tensors import expected_tensors
from mktts.spec import NUM_CODEBOOKS, ModelConfig, StackConfig
from mktts.training.weights import Weights, rotary

_INIT_STD = 0.02
_PREDICTOR = "talker.code_predictor"


class TalkerModel(nn.Module):
    """`w` holds exactly the tensors of model.safetensors."""

    def __init__(self, config: ModelConfig, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.config, self.dropout, self.codebook_size = config, dropout, config.predictor.vocab_size
        generator = torch.Generator().manual_seed(seed)

        def initial(name: str, p: Tensor) -> None:
            if p.dim() == 1:
                p.fill_(1.0) if "norm" in name else p.zero_()
                return
            std = _INIT_STD  # the text side passes two more layers than codes do, and would start 1 000 times quieter
            if "text_embedding" in name:
                std = 1.0
            elif "text_projection" in name:
                std = p.shape[1] ** -0.5 * (0.2 if "fc2" in name else 1.0)
            nn.init.normal_(p, 0, std, generator=generator)

        self.w = Weights({name: spec.shape for name, spec in expected_tensors(config).items()}, initial)

    def hidden(self, text: Tensor, control: Tensor, previous: Tensor) -> Tensor:
        """Normed hidden states (B, T, H) of whole sequences.

        text (B, T): text id of every row. control (B, T): codec id, or -1 for none. previous (B, T, 16): the frame that
        the row carries, or -1 for none.
        """
        x = F.embedding(text, self.w["talker.model.text_embedding.weight"])
        x = F.silu(self.w.linear("talker.text_projection.linear_fc1", x))
        x = self.w.linear("talker.text_projection.linear_fc2", x)
        control_rows = F.embedding(control.clamp(min=0), self.w["talker.model.codec_embedding.weight"])
        x = x + control_rows * (control >= 0).unsqueeze(-1)
        x = x + self.code_rows(previous.flatten(0, 1)).view_as(x)
        return self._run("talker.model", self.config.talker, x)

    def code0_logits(self, hidden: Tensor) -> Tensor:
        """(N, H) -> (N, talker vocabulary)."""
        return self.w.linear("talker.codec_head", hidden)

    def predictor_logits(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """Logits (N, 15, codebook) of codes 1 to 15, given the talker's hidden (N, H) and codes (N, 16)."""
        books = NUM_CODEBOOKS - 1
        known = F.embedding(codes[:, :books] + self._offsets(codes)[:books], torch.cat(self._tables()[:books]))
        x = torch.cat((hidden.unsqueeze(1), known.to(hidden.dtype)), 1)
        if f"{_PREDICTOR}.small_to_mtp_projection.weight" in self.w:
            x = self.w.linear(f"{_PREDICTOR}.small_to_mtp_projection", x)
        rows = self._run(f"{_PREDICTOR}.model", self.config.predictor, x)[:, 1:]
        heads = torch.stack([self.w[f"{_PREDICTOR}.lm_head.{i}.weight"] for i in range(books)])
        return torch.bmm(rows.transpose(0, 1), heads.transpose(1, 2).to(rows.dtype)).transpose(0, 1)

    def code_rows(self, codes: Tensor) -> Tensor:
        """Sum of the sixteen embeddings: codes (N, 16), -1 for none, -> (N, H).

        As one product with a row of zeros and ones: gradients of sixteen look-ups would be sorted sixteen times.
        """
        tables = torch.cat(self._tables())
        index = torch.where(codes >= 0, codes + self._offsets(codes), len(tables))
        chosen = torch.zeros(len(codes), len(tables) + 1, dtype=tables.dtype, device=codes.device)
        return chosen.scatter_(1, index, 1.0)[:, :-1] @ tables

    def _run(self, name: str, c: StackConfig, x: Tensor) -> Tensor:
        """A decoder stack over (B, T, H) from position 0, and its final norm."""
        turned, eps = rotary(x.shape[1], c.head_dim, c.rope_theta, x.device), c.rms_norm_eps
        for i in range(c.num_hidden_layers):
            layer = f"{name}.layers.{i}"
            seen = self.w.norm(f"{layer}.input_layernorm", x, eps)
            seen = self.w.attention(f"{layer}.self_attn", seen, c.head_dim, turned, eps)
            x = x + F.dropout(seen, self.dropout, self.training)
            inner = self.w.mlp(f"{layer}.mlp", self.w.norm(f"{layer}.post_attention_layernorm", x, eps))
            x = x + F.dropout(inner, self.dropout, self.training)
        return self.w.norm(f"{name}.norm", x, eps)

    def _tables(self) -> list[Tensor]:
        names = [f"{_PREDICTOR}.model.codec_embedding.{i}" for i in range(NUM_CODEBOOKS - 1)]
        return [self.w[f"{name}.weight"][: self.codebook_size] for name in ("talker.model.codec_embedding", *names)]

    def _offsets(self, codes: Tensor) -> Tensor:
        return torch.arange(NUM_CODEBOOKS, device=codes.device) * self.codebook_size
