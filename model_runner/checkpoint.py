"""The weights of a located model, one tensor at a time, under Hugging Face names.

Knows safetensors folders and GGUF files, checks the whole checkpoint before the first tensor is read, and undoes what
llama.cpp's converter did to the weights. It must not know modules, devices or dtypes to run in. Called by `loader`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import ModelFileError, Refusal, UnsupportedError
from halfbyte.model_runner.gguf import GGUFFile, can_dequantize
from halfbyte.model_runner.gguf_config import ROPE_FACTORS, hf_name
from halfbyte.model_runner.kv_scales import is_kv_scale
from halfbyte.model_runner.safetensors_files import check_folder
from halfbyte.model_runner.source import ModelFiles

# Types in which a safetensors checkpoint can hold weights, and those of the index tables that old ones carry along.
_LOADABLE = ("F64", "F32", "F16", "BF16", "I64", "I32", "U8", "BOOL")


# GGUF's types that the C++ kernels compute from as they are.
PACKED_TYPES = frozenset({"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"})


@dataclass(frozen=True, slots=True)
class GGUFRows:
    """A matrix whose rows are still GGUF blocks of type `type_name`: uint8 [O, L]."""

    type_name: str
    rows_OL: Tensor
    num_inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows_OL.shape[0], self.num_inputs


def checkpoint_tensors(files: ModelFiles, *, keeps_blocks: bool = False) -> Iterator[tuple[str, Tensor | GGUFRows]]:
    """(name, tensor) for every tensor, in the order of the files.

    Checks come at the call, not at the first tensor: ModelFileError names a file that is missing, truncated or malformed,
    UnsupportedError a type that cannot be read. Safetensors keep their dtype and may share memory with the file, which stays
    mapped only until the next tensor is asked for; GGUF tensors are float32, or GGUFRows where `keeps_blocks` and they can be.
    """
    return _gguf_tensors(files, keeps_blocks) if files.kind == "gguf" else _safetensors(files)


def _safetensors(files: ModelFiles) -> Iterator[tuple[str, Tensor]]:
    headers = check_folder(files.path)
    for path, tensors in headers.items():
        for name, tensor in tensors.items():
            if tensor.dtype not in _LOADABLE and not is_kv_scale(name):
                raise UnsupportedError(
                    Refusal(f"{path}: tensor {name} is stored as {tensor.dtype}", "use an unquantised checkpoint")
                )

    def read() -> Iterator[tuple[str, Tensor]]:
        from safetensors import SafetensorError, safe_open

        for path, tensors in headers.items():
            try:
                with safe_open(path, framework="pt") as file:
                    # In the order of the bytes: the file is read once, from front to back.
                    for name in sorted(tensors, key=lambda name: tensors[name].begin):
                        yield name, file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ModelFileError(f"{path} cannot be read: {error}") from None

    return read()


def _gguf_tensors(files: ModelFiles, keeps_blocks: bool) -> Iterator[tuple[str, Tensor | GGUFRows]]:
    file = GGUFFile(files.path)
    unreadable = sorted({info.type_name for info in file.tensors.values() if not can_dequantize(info.type_name)})
    if unreadable:
        raise UnsupportedError(Refusal(f"{files.path} holds tensors of type {', '.join(unreadable)}", "use another quantisation"))
    architecture = file.architecture
    heads = _head_counts(file) if architecture == "llama" else {}

    def read() -> Iterator[tuple[str, Tensor | GGUFRows]]:
        with file:
            for name in file.tensors:
                if name == ROPE_FACTORS:
                    continue
                info = file.tensors[name]
                is_packed = keeps_blocks and info.type_name in PACKED_TYPES and len(info.shape) == 2
                tensor = torch.from_numpy(file.read_rows(name) if is_packed else file.read_tensor(name))
                kind = name.split(".")[-2] if name.count(".") >= 2 else ""
                if kind in heads:
                    tensor = undo_rotary_permutation(tensor, heads[kind])
                if architecture == "gemma3" and name.endswith("norm.weight"):
                    tensor = tensor - 1.0
                whole = GGUFRows(info.type_name, tensor, info.shape[1]) if is_packed else tensor
                yield hf_name(name, architecture), whole

    return read()


def _head_counts(file: GGUFFile) -> dict[str, int]:
    """Which tensors of a layer have rotated rows, and in how many heads."""
    prefix = file.architecture
    heads = file.metadata.get(f"{prefix}.attention.head_count")
    kv_heads = file.metadata.get(f"{prefix}.attention.head_count_kv", heads)
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads < 1 or kv_heads < 1:
        raise ModelFileError(
            f"{file.path}: {prefix}.attention.head_count {heads!r} and head_count_kv {kv_heads!r} are not counts"
        )
    return {"attn_q": heads, "attn_k": kv_heads}


def undo_rotary_permutation(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows (head, pair, half) back to (head, half, pair): llama.cpp rotates neighbours, Hugging Face the two halves.

    tensor: [num_heads * head_dim, ...], a weight or a bias of q or k.
    """
    rows = tensor.shape[0]
    if rows % (2 * num_heads):
        raise ModelFileError(f"a rotated tensor with {rows} rows does not divide into {num_heads} heads of even dimension")
    return tensor.reshape(num_heads, rows // num_heads // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
