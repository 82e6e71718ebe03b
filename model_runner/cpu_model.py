"""A model run by the C++ kernels: the same calls as `layers.model.Model`, one call into the library per step.

Weights are packed while they are loaded (`PackingLoader`); the layers record their program at the first step, when the cache is
there. Weights keep the precision of the checkpoint; `product_type` says what they are multiplied with. Knows models and packed
weights; knows no requests.

Shape letters: T tokens, N rows that want logits, E hidden, V vocab, O outputs, L bytes of a row.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from halfbyte.config import ModelConfig
from halfbyte.errors import Refusal, UnsupportedError
from halfbyte.kernels.attention.base import AttentionBackend, AttentionSpec
from halfbyte.kernels.cpu.abi import RowType, WeightKind
from halfbyte.kernels.cpu.library import CpuEngine
from halfbyte.kernels.cpu.program import INPUT, OUTPUT, Program
from halfbyte.kernels.cpu.weights import PackedMatrix, WeightMemory, pack_dense, pack_rows, quantize_int8
from halfbyte.kvcache.tensors import LayerCache
from halfbyte.model_runner.checkpoint import GGUFRows
from halfbyte.model_runner.decoder_config import DecoderConfig
from halfbyte.model_runner.kv_scales import KVScales
from halfbyte.model_runner.layers.context import ForwardContext
from halfbyte.model_runner.layers.model import Model
from halfbyte.model_runner.layers.weights import LoadReport, MatrixModule, WeightTarget, copy_rows
from halfbyte.model_runner.loader import load_model
from halfbyte.model_runner.source import ModelFiles

# Instruction sets that multiply pairs of bfloat16, and bytes four at a time
NARROW_ISAS = frozenset({"avx512_bf16", "neon_bf16"})


class PackingLoader:
    """Puts checkpoint tensors into a model: matrices packed, the rest copied.

    quantization: "auto" keeps GGUF's blocks and stores dense matrices in `dtype`; "none" stores all in `dtype`; "int8" all as
    8-bit blocks. pairs: dense ones for products in pairs. kinds: how many matrices are stored in which way.
    """

    def __init__(self, engine: CpuEngine, dtype: torch.dtype, quantization: str, *, pairs: bool = False) -> None:
        self.kinds: dict[WeightKind, int] = {}
        self.keeps_blocks = quantization == "auto"
        self._pairs = pairs
        self._engine = engine
        self._dtype = dtype
        self._int8 = quantization == "int8"
        self._memory = WeightMemory()

    def __str__(self) -> str:
        return " ".join(f"{kind.name} x {count}" for kind, count in self.kinds.items())

    def put(self, target: WeightTarget, tensor: Tensor | GGUFRows) -> None:
        if not isinstance(target.module, MatrixModule) or target.name != "weight":
            assert isinstance(tensor, Tensor), "only matrices are packed"
            copy_rows(target, tensor)
            return
        matrix = self._pack(tensor)
        target.module.packed[target.start] = matrix
        self.kinds[matrix.kind] = self.kinds.get(matrix.kind, 0) + 1

    def _pack(self, tensor: Tensor | GGUFRows) -> PackedMatrix:
        if isinstance(tensor, GGUFRows):
            return pack_rows(self._engine, WeightKind[tensor.type_name], tensor.rows_OL, tensor.num_inputs, self._memory)
        if self._int8 and tensor.shape[1] % 32 == 0:
            rows_OL = quantize_int8(self._engine, tensor.float())
            return pack_rows(self._engine, WeightKind.Q8_0, rows_OL, tensor.shape[1], self._memory)
        return pack_dense(self._engine, tensor.to(self._dtype), self._memory, pairs=self._pairs)


class CpuModel:
    """`model`, whose matrices are packed, on `engine`. dtype: of the checkpoint's arithmetic."""

    def __init__(self, model: Model, engine: CpuEngine, dtype: torch.dtype, product_type: RowType = RowType.FLOATS) -> None:
        self.model = model
        self.engine = engine
        self._dtype = dtype
        self.tap_rows = 0  # of `Program`
        self._program: Program | None = None
        self._tapped = 0
        self._caches: list[LayerCache] = []
        self.product_type = product_type
        self._head = Program(engine, product_type)
        self._head.linear(self._head.rounded(INPUT, model.config.hidden_size), OUTPUT, model.head.matrices)
        self._best = Program(engine, product_type)
        self._best.best(self._best.rounded(INPUT, model.config.hidden_size), OUTPUT, model.head.matrices[0])

    @property
    def config(self) -> DecoderConfig:
        return self.model.config

    @property
    def backend(self) -> AttentionBackend:
        return self.model.backend

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    def attention_specs(self) -> list[AttentionSpec]:
        return self.model.attention_specs()

    def __call__(self, token_ids_T: Tensor, positions_T: Tensor, context: ForwardContext) -> Tensor:
        """Hidden states after the final norm, float32 [T, E]. Writes K and V into the caches of `context`."""
        if self._program is None or self._caches is not context.caches or self._tapped != self.tap_rows:
            self._program = Program(self.engine, self.product_type, tap_rows=self.tap_rows)
            self._caches, self._tapped = context.caches, self.tap_rows
            self.model.record(self._program, context, self._dtype, OUTPUT)
        return self._program.run(
            token_ids_T.shape[0],
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            seat_T=context.seat_T,
            rotaries=self.model.rotary_inputs(positions_T),
            metadata=context.metadata,
        )

    @property
    def taps(self) -> list[Tensor]:
        """Queries, keys and values of the last step, per layer, side by side; see `Program`."""
        assert self._program is not None
        return self._program.taps

    def compute_logits(self, hidden_NE: Tensor) -> Tensor:
        """float32 [N, V] for the given rows only."""
        return self.model.cap_logits(self._head.run(hidden_NE.shape[0], input_TE=hidden_NE))

    def best_tokens(self, hidden_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's token of the greatest logit (int64 [N]; the first of equals) and that logit, without making the others.

        A row whose logits hold a NaN has NaN. A cap on the logits changes no order and is left out.
        """
        best_N2 = self._best.run(hidden_NE.shape[0], input_TE=hidden_NE)
        return best_N2.view(torch.int32)[:, 1].long(), best_N2[:, 0]

    def forget_caches(self) -> None:
        """Let go of the caches of the last step, which the program points to; the next step records it anew."""
        self._program, self._caches = None, []

    def close(self) -> None:
        """End the threads."""
        self.engine.close()


def stores_pairs(engine: CpuEngine, dtype: torch.dtype, quantization: str, *, is_gguf: bool) -> bool:
    """Whether dense matrices are stored to be multiplied in pairs: all are bfloat16, and the machine has such instructions."""
    is_all_bf16 = dtype is torch.bfloat16 and (quantization == "none" or (quantization == "auto" and not is_gguf))
    return is_all_bf16 and engine.isa in NARROW_ISAS


def product_type(engine: CpuEngine, dtype: torch.dtype, kinds: Collection[WeightKind], activations: str = "auto") -> RowType:
    """What products read, for matrices of these kinds. UnsupportedError when `activations` "int8" cannot be.

    bfloat16 for those stored in pairs. Whole numbers of 16 bits in blocks of 32 (or 8 bits, where asked for), each with its own
    scale, where all weights are whole numbers, the machine multiplies bytes, and `dtype` asks for no more. float32 else.
    """
    floating = sorted({kind.name.lower() for kind in kinds if not kind.is_whole})
    reasons = [
        (engine.isa not in NARROW_ISAS, f"{engine.isa} does not multiply bytes four at a time", "leave --cpu-activations out"),
        (dtype is torch.float32, "--dtype float32 computes in float32", "use --dtype bfloat16"),
        (bool(floating), f"weights are stored as {', '.join(floating)}", "use a quantised GGUF file or --quantization int8"),
    ]
    refusals = [Refusal(f"--cpu-activations int8: {reason}", fix) for holds, reason, fix in reasons if holds]
    if not refusals:
        return RowType.INT8 if activations == "int8" else RowType.INT16
    if activations == "int8":
        raise UnsupportedError(*refusals)
    return RowType.BF16 if kinds and all(kind is WeightKind.BF16_PAIRS for kind in kinds) else RowType.FLOATS


def load_cpu_model(
    files: ModelFiles, decoder: DecoderConfig, settings: ModelConfig, backend: AttentionBackend, scales: KVScales
) -> tuple[CpuModel, LoadReport, str]:
    """The model on `settings.num_threads` threads, what loading did, and which kernels run."""
    dtype = getattr(torch, settings.dtype)
    engine = CpuEngine(settings.num_threads)
    pairs = stores_pairs(engine, dtype, settings.quantization, is_gguf=files.kind == "gguf")
    packing = PackingLoader(engine, dtype, settings.quantization, pairs=pairs)
    model, report = load_model(files, decoder, dtype, "cpu", settings.load_format, backend, packing, scales)
    rows = product_type(engine, dtype, packing.kinds, settings.cpu_activations)
    used = f"{engine.isa}, {engine.num_threads} threads; linear {packing}, {rows.name.lower()} activations"
    return CpuModel(model, engine, dtype, rows), report, used
