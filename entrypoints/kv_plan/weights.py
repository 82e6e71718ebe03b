"""How many bytes of weights a decode step reads: from sizes that files and configurations state, never from the weights.

The embedding is left out where the head has a matrix of its own: a token reads one row of it. Called by `halfbyte kv-plan`.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.model_runner.decoder_config import DecoderConfig
from halfbyte.model_runner.gguf import GGUFFile
from halfbyte.model_runner.safetensors_files import INDEX_NAME, weight_files
from halfbyte.model_runner.source import ModelFiles, read_optional_json

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GGUF_EMBEDDING = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class StepWeights:
    """num_bytes: what every step reads. source: where that is known from, as the end of a sentence."""

    num_bytes: int
    source: str


def step_weights(files: ModelFiles, config: DecoderConfig) -> StepWeights:
    """From the GGUF header, the safetensors index, the sizes of the safetensors files or, without any, the configuration."""
    if files.kind == "gguf":
        return StepWeights(_gguf_bytes(files, config), "as the header says")
    index = read_optional_json(files.path / INDEX_NAME).get("metadata")
    stated = index.get("total_size") if isinstance(index, dict) else None
    sizes = [path.stat().st_size for path in weight_files(files.path)]
    item_bytes = _ITEM_BYTES[config.checkpoint_dtype]
    unread = 0 if config.tie_embeddings else item_bytes * config.vocab_size * config.hidden_size
    if isinstance(stated, int) and stated > unread:
        return StepWeights(stated - unread, f"as {INDEX_NAME} says")
    if sum(sizes) > unread:
        return StepWeights(sum(sizes) - unread, "by the size of the files")
    return StepWeights(item_bytes * _num_weights(config), f"the matrices of the configuration in {config.checkpoint_dtype}")


def _gguf_bytes(files: ModelFiles, config: DecoderConfig) -> int:
    with GGUFFile(files.path) as file:
        return sum(tensor.num_bytes for name, tensor in file.tensors.items() if name != _GGUF_EMBEDDING or config.tie_embeddings)


def _num_weights(config: DecoderConfig) -> int:
    """Those of the matrices that a step reads: of the layers and of the head."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * query + 2 * key + 3 * config.intermediate_size)
    return config.num_layers * layer + config.vocab_size * config.hidden_size
