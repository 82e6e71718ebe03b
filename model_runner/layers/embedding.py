"""Token embeddings, and the head that turns hidden states into logits; with tied embeddings both use one matrix.

Called by the model.

Shape letters: T tokens, N rows that want logits, E hidden, V vocab.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from halfbyte.model_runner.layers.weights import MatrixModule, weight


class Embedding(MatrixModule):
    """A matrix [V, E]. scale multiplies the embeddings after it was rounded to their dtype, as the checkpoint expects."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = weight(vocab_size, hidden_size)
        self.scale = scale

    def forward(self, token_ids_T: Tensor) -> Tensor:
        x_TE = F.embedding(token_ids_T, self.weight)
        return x_TE if self.scale == 1.0 else x_TE * self.rounded_scale(x_TE.dtype)

    def rounded_scale(self, dtype: torch.dtype) -> float:
        return float(torch.tensor(self.scale, dtype=dtype))

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Scores of every token, float32; the multiplication runs in the model's dtype."""
        return F.linear(hidden_NE, self.weight).float()
