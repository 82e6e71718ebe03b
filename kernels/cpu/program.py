"""A model's forward pass as a program for the C++ kernels: recorded once by its layers, then run with one call per step.

The layers name buffers and add operations; nothing is computed until `run`. What an operation points to (weights, norms, caches)
is kept alive here. Activations are float32, or bfloat16 where products read such; a few hundred rows go through at a time, longer
steps in slices, with the same bits.
Knows packed weights and caches; knows nothing of model families.

Shape letters: T tokens, E columns, D head dim.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as once
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfbyte.kernels.cpu import abi
from halfbyte.kernels.cpu.abi import ACTIVATIONS, CACHE_FORMATS, CODECS, OpCode, RowType
from halfbyte.kernels.cpu.library import CpuEngine
from halfbyte.kernels.cpu.lora import PackedLora
from halfbyte.kernels.cpu.weights import PackedMatrix, pack_dense
from halfbyte.kvcache.formats.tiles import TilesFormat
from halfbyte.kvcache.formats.turboquant import levels
from halfbyte.kvcache.turns import LayerTurns

if TYPE_CHECKING:
    from halfbyte.kernels.attention.base import AttentionMetadata, AttentionSpec
    from halfbyte.kvcache.tensors import LayerCache

# Floats between the end of a row and the next: rows then do not fall into the same lines of a cache.
_ROW_GAP = 16
OUTPUT, INPUT = -1, -2
NO_ROTATION = -1


@dataclass(frozen=True, slots=True)
class RotaryInput:
    """Frequencies of one rotary embedding: float32 [F], or [T, F] where they depend on the token."""

    inv_freq: Tensor
    factor: float


class Program:
    """Operations in order. product_type: what the inputs of products are, which depends on the kind of all its matrices.

    tap_rows: keep queries, keys and values of steps of up to so many tokens, as attention sees them, in `taps`: one per layer.
    Buffers are numbers from `buffer`; INPUT and OUTPUT are the tensors that `run` takes and returns.
    """

    def __init__(self, engine: CpuEngine, product_type: RowType = RowType.FLOATS, *, tap_rows: int = 0) -> None:
        self.taps: list[Tensor] = []
        self._tap_rows = tap_rows
        self._turns: list[tuple[Tensor, PackedMatrix]] = []
        self._engine = engine
        self._product_type = product_type
        self._ops: list[abi.Op] = []
        self._kept: list[Any] = []
        self._widths: dict[str, int] = {}
        self._memory: list[Tensor] = []
        self._compiled: tuple[Any, Any] | None = None
        self._output_width = 0

    def buffer(self, name: str, width: int) -> int:
        """The buffer called `name`, of at least `width` columns; the layers of a model share theirs."""
        self._widths[name] = max(width, self._widths.get(name, 0))
        return list(self._widths).index(name)

    def embed(self, matrix: PackedMatrix, out: int, scale: float) -> None:
        """out = scale * the token's row of `matrix`."""
        self._add(OpCode.EMBED, out=out, scale=scale, matrices=self._matrices([matrix]))

    def rotary(self, index: int, out: int) -> None:
        """out = cos | sin of the tokens' angles, for the rotary `index` of the step."""
        self._add(OpCode.ROTARY, out=out, aux=index)

    def norm(self, in_: int, out: int, weight_E: Tensor, eps: float, *, adds: bool = False) -> None:
        """out (+)= in / rms(in) * weight, over the weight's width."""
        self._note_output(out, weight_E.shape[0])
        self._add(
            OpCode.NORM,
            in_=in_,
            out=out,
            out_type=RowType.FLOATS if adds else self._type_of_input(out),
            width=weight_E.shape[0],
            weight=self._floats(weight_E),
            eps=eps,
            adds=adds,
        )

    def linear(
        self, in_: int, out: int, matrices: Sequence[PackedMatrix], *, adds: bool = False, lora: PackedLora | None = None
    ) -> None:
        """out (+)= in W^T + bias, the outputs of `matrices` side by side. `in` holds rows of the product type.

        lora: what adapters add to it, for the tokens that have one.
        """
        self._note_output(out, sum(matrix.num_outputs for matrix in matrices))
        self._add(
            OpCode.LINEAR,
            in_=in_,
            in_type=self._product_type,
            out=out,
            matrices=self._matrices(matrices),
            num_matrices=len(matrices),
            adds=adds,
            **self._shrunk(in_, lora),
        )

    def best(self, in_: int, out: int, matrix: PackedMatrix) -> None:
        """out [T, 2] = the greatest of in W^T and, as the bits of an int32, its number; the product is not kept."""
        self._note_output(out, 2)
        pairs = self.buffer("pairs", 2 * -(-matrix.num_outputs // self._engine.panel))
        matrices = self._matrices([matrix])
        self._add(OpCode.BEST, in_=in_, in_type=self._product_type, out=pairs, matrices=matrices)
        self._add(OpCode.BEST_OF_PANELS, in_=pairs, out=out, matrices=matrices)

    def gated(
        self, in_: int, out: int, gate: PackedMatrix, up: PackedMatrix, activation: str, lora: PackedLora | None = None
    ) -> None:
        """out = activation(in gate^T) * (in up^T); lora: what adapters add to both products."""
        self._add(
            OpCode.GATED,
            in_=in_,
            in_type=self._product_type,
            out=out,
            out_type=self._type_of_result(out),
            matrices=self._matrices([gate, up]),
            activation=ACTIVATIONS[activation],
            **self._shrunk(in_, lora),
        )
        self._round_result(out, gate.num_outputs)

    def _shrunk(self, in_: int, lora: PackedLora | None) -> dict[str, Any]:
        """The fields that a product with adapters reads; the first half of what these do to it is an operation before it."""
        if lora is None:
            return {}
        self._keep(lora)
        width = -(-lora.max_ranks // self._engine.panel) * self._engine.panel
        shrunk = self.buffer("lora", width)
        self._add(OpCode.SHRINK, in_=in_, in_type=self._product_type, out=shrunk, width=width, loras=lora.table)
        return {"aux": shrunk, "loras": lora.table}

    def rounded(self, in_: int, width: int) -> int:
        """The buffer with the rows of `in_` as products read them; `in_` holds float32 [T, width]."""
        if self._product_type is RowType.FLOATS:
            return in_
        out = self.buffer("rounded", width)
        self._add(OpCode.ROUND, in_=in_, out=out, out_type=self._product_type, width=width)
        return out

    def attention(
        self,
        qkv: int,
        out: int,
        rotation: int,
        spec: AttentionSpec,
        cache: LayerCache,
        group: int,
        *,
        q_norm_D: Tensor | None = None,
        k_norm_D: Tensor | None = None,
        eps: float = 0.0,
        sinks_H: Tensor | None = None,
    ) -> None:
        """Norms and rotates q and k in place, writes k and v into the cache, and attends: out = heads side by side.

        qkv holds q, k and v side by side; rotation: a buffer of `rotary`, or NO_ROTATION.
        """
        self._note_output(out, spec.num_heads * spec.head_dim_v)
        assert spec.sinks is (sinks_H is not None), "a spec with sinks comes with their values"
        attention = self._keep(attention_structure(spec, cache, group))
        attention.sinks = None if sinks_H is None else self._floats(sinks_H)
        pointer = ctypes.pointer(attention)
        self._add(
            OpCode.HEADS,
            in_=qkv,
            aux=rotation,
            attention=pointer,
            weight=None if q_norm_D is None else self._floats(q_norm_D),
            weight2=None if k_norm_D is None else self._floats(k_norm_D),
            eps=eps,
        )
        if self._tap_rows:
            width = (spec.num_heads + spec.num_kv_heads) * spec.head_dim + spec.num_kv_heads * spec.head_dim_v
            self.taps.append(torch.zeros(self._tap_rows, width))
            self._add(OpCode.TAP, in_=qkv, width=width, tap=self.taps[-1].data_ptr())
        turns = cache.turns or LayerTurns()
        k_column, v_column = spec.num_heads * spec.head_dim, (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        group_size = spec.num_heads // spec.num_kv_heads
        queries = self._turned(0, turns.q_GDD, group_size)
        keys = self._turned(k_column, turns.k_GDD, 1, turns.k_shift_GD)
        self._turn(qkv, [*queries, *keys, *self._turned(v_column, turns.v_GDD, 1)])
        if attention.cache.format == abi.CODED:
            self._add(OpCode.STORE, in_=qkv, attention=pointer)
        in_type = RowType.FLOATS if self._product_type is RowType.FLOATS else RowType.BF16
        out_type = self._type_of_result(out) if turns.out_GDD is None else RowType.FLOATS
        self._add(OpCode.ATTEND, in_=qkv, in_type=in_type, out=out, out_type=out_type, attention=pointer)
        self._add(OpCode.COMBINE, out=out, out_type=out_type, attention=pointer)
        self._turn(out, self._turned(0, turns.out_GDD, group_size))
        if out_type is not self._type_of_input(out):
            width = spec.num_heads * spec.head_dim_v
            self._add(OpCode.ROUND, in_=out, out=out, out_type=self._type_of_input(out), width=width)

    def _turn(self, buffer: int, parts: list[tuple[int, PackedMatrix]]) -> None:
        """Multiply heads in place: each with its matrix, from its column on."""
        if not parts:
            return
        array = (abi.Matrix * len(parts))()
        for at, (column, matrix) in enumerate(parts):
            array[at] = self._matrix(matrix, column)
        matrices = ctypes.cast(self._keep(array), ctypes.POINTER(abi.Matrix))
        self._add(OpCode.TURN, in_=buffer, matrices=matrices, num_matrices=len(parts))

    def _turned(
        self, column: int, matrix_GDD: Tensor | None, per_matrix: int, shift_GD: Tensor | None = None
    ) -> list[tuple[int, PackedMatrix]]:
        """Heads side by side from `column` on, `per_matrix` of them with each matrix; the shift is subtracted after it."""
        if matrix_GDD is None:
            return []
        if matrix_GDD.stride(0) == 0:  # one for all heads, and mostly for all layers
            matrices = [self._shared_turn(matrix_GDD[0])] * matrix_GDD.shape[0]
        else:
            matrices = [pack_dense(self._engine, matrix_DD) for matrix_DD in matrix_GDD]
        for matrix, shift_D in zip(matrices, [] if shift_GD is None else shift_GD, strict=shift_GD is not None):
            matrix.bias = -shift_D
        heads = [matrix for matrix in matrices for _ in range(per_matrix)]
        return [(column + at * matrix.num_outputs, matrix) for at, matrix in enumerate(heads)]

    def _shared_turn(self, matrix_DD: Tensor) -> PackedMatrix:
        known = next((packed for tensor, packed in self._turns if torch.equal(tensor, matrix_DD)), None)
        if known is None:
            known = pack_dense(self._engine, matrix_DD)
            self._turns.append((matrix_DD, known))
        return known

    def run(
        self,
        num_tokens: int,
        *,
        input_TE: Tensor | None = None,
        token_ids_T: Tensor | None = None,
        positions_T: Tensor | None = None,
        seat_T: Tensor | None = None,
        rotaries: Sequence[RotaryInput] = (),
        metadata: Sequence[AttentionMetadata] = (),
    ) -> Tensor:
        """OUTPUT as float32 [num_tokens, width]. input_TE: what the first operation that reads INPUT wants; token_ids_T and
        positions_T: int64; seat_T: int32, where each token's adapter sits, 0 for none; None: no token has one. metadata: one per
        KV group.

        A program needs those of them that its operations read.
        """
        ops, buffers = self._compile()
        output_TE = torch.empty(num_tokens, self._output_width)
        rotary_array = (abi.Rotary * len(rotaries))(*map(_rotary_structure, rotaries))
        groups = [(one, one.block_table.contiguous()) for one in metadata]  # alive until the call returns
        group_array = (abi.Group * len(groups))(*(_group_structure(one, table) for one, table in groups))
        step = abi.Step(
            token_ids=_address(token_ids_T),
            positions=_address(positions_T),
            seats=_address(seat_T),
            input=_address(input_TE),
            output=output_TE.data_ptr(),
            input_stride=0 if input_TE is None else input_TE.stride(0) * input_TE.element_size() // 4,
            output_stride=self._output_width,
            rotaries=rotary_array,
            groups=group_array,
            num_tokens=num_tokens,
            num_requests=len(metadata[0].seq_lens_host) if metadata else 0,
            num_groups=len(groups),
            num_rotaries=len(rotaries),
        )
        self._engine.library.hb_run(self._engine.handle, ops, len(self._ops), buffers, ctypes.byref(step))
        return output_TE

    def _compile(self) -> tuple[Any, Any]:
        if self._compiled is None:
            rows = self._engine.slice_rows
            self._memory = [torch.zeros(rows, width + _ROW_GAP) for width in self._widths.values()]
            buffers = (abi.Buffer * len(self._memory))(*(abi.Buffer(m.data_ptr(), m.stride(0)) for m in self._memory))
            self._compiled = (abi.Op * len(self._ops))(*self._ops), buffers
        return self._compiled

    def _add(self, code: OpCode, **fields: Any) -> None:
        assert self._compiled is None, "a program that has run is finished"
        self._ops.append(abi.Op(code=code, **fields))

    def _type_of_input(self, buffer: int) -> RowType:
        """What is put into a buffer that products read; OUTPUT is float32."""
        return RowType.FLOATS if buffer == OUTPUT else self._product_type

    def _type_of_result(self, buffer: int) -> RowType:
        """The same for operations whose items hold parts of a row: these cannot be rounded to whole numbers one by one."""
        found = self._type_of_input(buffer)
        return RowType.FLOATS if found in (RowType.INT8, RowType.INT16) else found

    def _round_result(self, buffer: int, width: int) -> None:
        if (wanted := self._type_of_input(buffer)) is not self._type_of_result(buffer):
            self._add(OpCode.ROUND, in_=buffer, out=buffer, out_type=wanted, width=width)

    def _note_output(self, out: int, width: int) -> None:
        if out == OUTPUT:
            self._output_width = width

    def _keep(self, value: Any) -> Any:
        self._kept.append(value)
        return value

    def _floats(self, tensor: Tensor) -> int:
        assert tensor.dtype == torch.float32
        pointer: int = self._keep(tensor.contiguous()).data_ptr()
        return pointer

    def _matrices(self, matrices: Sequence[PackedMatrix]) -> Any:
        array = (abi.Matrix * len(matrices))()
        column = 0
        for at, matrix in enumerate(matrices):
            array[at] = self._matrix(matrix, column)
            column += matrix.num_outputs
        return ctypes.cast(self._keep(array), ctypes.POINTER(abi.Matrix))

    def _matrix(self, matrix: PackedMatrix, column: int) -> abi.Matrix:
        """Whose outputs go to the columns from `column` on."""
        self._keep(matrix)
        return matrix.structure(column, None if matrix.bias is None else self._floats(matrix.bias))


def attention_structure(spec: AttentionSpec, cache: LayerCache, group: int) -> abi.Attention:
    """A layer's attention with the addresses of its cache."""
    first = cache.first
    shift = 0 if first is None else cache.spec.first_tokens // first.spec.block_size
    return abi.Attention(
        cache=_cache_structure(cache),
        first=abi.Cache() if first is None else _cache_structure(first),
        first_tokens=cache.spec.first_tokens,
        entry_shift=shift - cache.spec.first_tokens // cache.spec.block_size,
        sinks=None,
        group=group,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        window=spec.sliding_window or 0,
        scale=spec.scale,
        soft_cap=spec.soft_cap or 0.0,
    )


def _cache_structure(cache: LayerCache) -> abi.Cache:
    sides = (("k", cache.scales.k_G, cache.spec.head_dim), ("v", cache.scales.v_G, cache.spec.head_dim_v))
    if not isinstance(cache.format, TilesFormat):
        plain = [
            abi.Side(codes=_plane_structure(cache.planes[name]), codec=CODECS.get(cache.format.name, 0)) for name, *_ in sides
        ]
        return abi.Cache(*plain, CACHE_FORMATS[cache.format.name], cache.spec.block_size)
    found = []
    for (name, scale_G, dim), side in zip(sides, (cache.format.k, cache.format.v), strict=True):
        planes = [_plane_structure(cache.planes.get(name + suffix)) for suffix in ("", "_high", "_extra")]
        table = _levels(dim) if side.codec.name == "turboquant_4bit_key" else None
        scales = scale_G.data_ptr() if side.codec.uses_scale else None
        found.append(abi.Side(*planes, scales, _address(table), CODECS[side.codec.name]))
    return abi.Cache(*found, abi.CODED, cache.spec.block_size)


@once
def _levels(dim: int) -> Tensor:
    """Kept for ever: structures hold its address."""
    return levels(dim)


def _plane_structure(plane: Tensor | None) -> abi.Plane:
    if plane is None:
        return abi.Plane()
    return abi.Plane(plane.data_ptr(), *(stride * plane.element_size() for stride in plane.stride()[:3]))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _rotary_structure(rotary: RotaryInput) -> abi.Rotary:
    freqs = rotary.inv_freq
    return abi.Rotary(freqs.data_ptr(), 0 if freqs.dim() == 1 else freqs.stride(0), freqs.shape[-1], rotary.factor)


def _group_structure(metadata: AttentionMetadata, block_table: Tensor) -> abi.Group:
    return abi.Group(
        metadata.query_start_loc.data_ptr(),
        metadata.seq_lens.data_ptr(),
        block_table.data_ptr(),
        metadata.slot_mapping.data_ptr(),
        None if metadata.first is None else metadata.first.slot_mapping.data_ptr(),
        block_table.shape[1],
    )
