"""llama.cpp for `compare.py`: libllama from the package `llama-cpp-py-sync` under a small continuous-batching loop of our own.

All computing and the KV cache are llama.cpp's; this file fills batches (decodes first, then prompts in chunks up to the batch's
budget) and takes the largest logit. A token's time is taken after that, so Python's share is part of the measurement. The dtype
is that of the GGUF file. Options: fields of llama_context_params, such as {"n_ubatch": 512, "flash_attn_type": 1}.
`worker.py` loads this file, and `setup_peers` calls `requantize`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

SHIM = "libisoc23.so"  # beside the package's libraries where the C library is older than the one they were built on
F32, BF16 = 0, 32  # llama_ftype


def _open_library() -> tuple[Any, Any]:
    """(functions, cffi) of libllama, silenced."""
    package = importlib.util.find_spec("llama_cpp_py_sync")
    assert package is not None and package.origin is not None, "llama-cpp-py-sync is not installed here"
    shim = Path(package.origin).with_name(SHIM)
    if shim.exists():
        ctypes.CDLL(str(shim), ctypes.RTLD_GLOBAL)
    from llama_cpp_py_sync._cffi_bindings import get_ffi, get_lib

    lib, ffi = get_lib(), get_ffi()
    lib.llama_backend_init()
    return lib, ffi


@dataclass
class _Sequence:
    """A prompt in its slot of the KV cache. num_computed: tokens handed to llama.cpp so far."""

    slot: int
    prompt: list[int]
    num_computed: int = 0
    stream: list[tuple[int, float]] = field(default_factory=list)


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._lib, self._ffi = lib, ffi = _open_library()
        model_params = lib.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model = lib.llama_model_load_from_file(settings["model"].encode(), model_params)
        assert model != ffi.NULL, f"llama.cpp cannot load {settings['model']}"
        params = lib.llama_context_default_params()
        params.n_ctx = settings["max_num_seqs"] * settings["max_model_len"]
        params.n_seq_max = settings["max_num_seqs"]
        params.n_threads = params.n_threads_batch = settings["num_threads"]
        params.no_perf = True
        for name, value in settings["options"].items():
            setattr(params, name, value)
        self._context = lib.llama_init_from_model(model, params)
        assert self._context != ffi.NULL, "llama.cpp cannot make a context with these options"
        self._memory = lib.llama_get_memory(self._context)
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._max_rows = lib.llama_n_batch(self._context)
        self._batch = lib.llama_batch_init(self._max_rows, 0, 1)

    def versions(self) -> dict[str, str]:
        info = self._ffi.string(self._lib.llama_print_system_info()).decode()
        return {"llama-cpp-py-sync": version("llama-cpp-py-sync"), "system info": info}

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[tuple[int, float]]]:
        self._lib.llama_memory_clear(self._memory, False)
        sequences = [_Sequence(slot, prompt) for slot, prompt in enumerate(prompts)]
        while any(len(sequence.stream) < output_len for sequence in sequences):
            self._step(sequences, output_len)
        return [sequence.stream for sequence in sequences]

    def _step(self, sequences: list[_Sequence], output_len: int) -> None:
        """One batch: the next token of every sequence that has begun, then as much of the others' prompts as fits."""
        self._batch.n_tokens = 0
        ends: list[tuple[int, _Sequence]] = []  # (row, whose logits it has)
        for sequence in sequences:
            if 0 < len(sequence.stream) < output_len:
                ends.append((self._put(sequence, sequence.stream[-1][0], has_logits=True), sequence))
        for sequence in sequences:
            room = self._max_rows - self._batch.n_tokens
            for token_id in sequence.prompt[sequence.num_computed :][:room]:
                is_last = sequence.num_computed + 1 == len(sequence.prompt)
                row = self._put(sequence, token_id, has_logits=is_last)
                if is_last:
                    ends.append((row, sequence))
        if code := self._lib.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode returned {code}")
        token_ids = [self._argmax(row) for row, _ in ends]
        seen_s = time.perf_counter()
        for token_id, (_, sequence) in zip(token_ids, ends, strict=True):
            sequence.stream.append((token_id, seen_s))

    def _put(self, sequence: _Sequence, token_id: int, has_logits: bool) -> int:
        """Add a row to the batch; returns its index."""
        batch, row = self._batch, self._batch.n_tokens
        batch.token[row] = token_id
        batch.pos[row] = sequence.num_computed
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = sequence.slot
        batch.logits[row] = has_logits
        batch.n_tokens += 1
        sequence.num_computed += 1
        return int(row)

    def _argmax(self, row: int) -> int:
        logits = self._lib.llama_get_logits_ith(self._context, row)
        return int(np.frombuffer(self._ffi.buffer(logits, 4 * self._vocab_size), np.float32).argmax())


def requantize(source: str, target: str, file_type: int) -> None:
    """Write all matrices of a GGUF file in one type (F32 or BF16)."""
    lib, ffi = _open_library()
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.pure, params.allow_requantize, params.nthread = file_type, True, True, 1
    code = lib.llama_model_quantize(source.encode(), target.encode(), ffi.new("llama_model_quantize_params *", params))
    if code:
        raise RuntimeError(f"llama_model_quantize returned {code}")
