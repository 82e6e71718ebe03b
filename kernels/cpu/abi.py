"""The structures of csrc/program.h as ctypes, field by field, and the functions of the library.

Knows the layout and nothing of its meaning. `declare` compares every size with what the library was compiled with: a library of
another version is refused instead of misread. Called by `library`.
"""

from __future__ import annotations

from ctypes import CDLL, POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p, sizeof
from enum import IntEnum


class WeightKind(IntEnum):
    """How the numbers of a weight matrix are stored; the names of GGUF's types."""

    F32 = 0
    BF16 = 1
    F16 = 2
    Q8_0 = 3
    Q4_0 = 4
    Q4_1 = 5
    Q5_0 = 6
    Q5_1 = 7
    Q4_K = 8
    Q5_K = 9
    Q6_K = 10
    BF16_PAIRS = 11

    @property
    def is_whole(self) -> bool:
        """Whether weights are whole numbers with scales, which can be multiplied with bytes."""
        return self not in (WeightKind.F32, WeightKind.BF16, WeightKind.F16, WeightKind.BF16_PAIRS)


class RowType(IntEnum):
    """What the rows of a buffer hold."""

    FLOATS = 0
    BF16 = 1
    INT8 = 2
    INT16 = 3


class OpCode(IntEnum):
    """What an operation does; ops.h says which fields it reads."""

    EMBED = 0
    ROTARY = 1
    NORM = 2
    LINEAR = 3
    GATED = 4
    HEADS = 5
    ATTEND = 6
    COMBINE = 7
    BEST = 8
    BEST_OF_PANELS = 9
    ROUND = 10
    TURN = 11
    STORE = 12
    TAP = 13
    SHRINK = 14


ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
CACHE_FORMATS = {"float32": 0, "bfloat16": 1, "float16": 2, "bfloat16_pairs": 3}
CODED = 4  # what `kvcache.formats.tiles` arranges
CODECS = {
    name: number
    for number, name in enumerate(
        ("float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head")
        + ("int4_per_token_head", "nvfp4", "nvfp4_4over6", "int4", "int5", "int6", "ultraquant_4bit")
        + ("turboquant_4bit_key", "turboquant_4bit_value")
    )
}

# Blocks in tiles hold a multiple of so many tokens, and vectors of so many numbers; kGroupKeys of kv_tiles.h
TILE = 16

# Blocks of bfloat16_pairs hold a multiple of so many tokens, values have a multiple of so many dims; as in kv_tiles.h, kv_pairs.h
PAIR_BLOCK = 16
PAIR_DIMS = 32

# Matrices of a product that adapters change; as in program.h
MAX_PARTS = 3

# Limits of attention.h
MAX_HEAD_DIM = 512
MAX_HEADS_PER_KV_HEAD = 64


class Matrix(Structure):
    """One packed weight."""

    _fields_ = [
        ("data", c_void_p),
        ("bias", c_void_p),
        ("panel_bytes", c_int64),
        ("kind", c_int32),
        ("num_outputs", c_int32),
        ("num_inputs", c_int32),
        ("first_column", c_int32),
    ]


class Lora(Structure):
    """One adapter at one product."""

    _fields_ = [("a", Matrix), ("scales", c_void_p), ("b", Matrix * MAX_PARTS)]


class Plane(Structure):
    """One plane of a layer's cache; strides in bytes."""

    _fields_ = [("data", c_void_p), ("block_stride", c_int64), ("head_stride", c_int64), ("row_stride", c_int64)]


class Side(Structure):
    """K or V of one layer."""

    _fields_ = [
        ("codes", Plane),
        ("high", Plane),
        ("extra", Plane),
        ("scales", c_void_p),
        ("table", c_void_p),
        ("codec", c_int32),
        ("reserved", c_int32),
    ]


class Cache(Structure):
    """One layer's cache."""

    _fields_ = [("k", Side), ("v", Side), ("format", c_int32), ("block_size", c_int32)]


class Attention(Structure):
    """One layer's attention."""

    _fields_ = [
        ("cache", Cache),
        ("first", Cache),
        ("first_tokens", c_int32),
        ("entry_shift", c_int32),
        ("sinks", c_void_p),
        ("group", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("head_dim_v", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
    ]


class Op(Structure):
    """One operation of a program."""

    _fields_ = [
        ("code", c_int32),
        ("in_", c_int32),
        ("out", c_int32),
        ("aux", c_int32),
        ("width", c_int32),
        ("num_matrices", c_int32),
        ("activation", c_int32),
        ("adds", c_int32),
        ("in_type", c_int32),
        ("out_type", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("weight", c_void_p),
        ("weight2", c_void_p),
        ("matrices", POINTER(Matrix)),
        ("attention", POINTER(Attention)),
        ("tap", c_void_p),
        ("loras", POINTER(Lora)),
    ]


class Buffer(Structure):
    """Rows of float32 activations; stride in floats."""

    _fields_ = [("data", c_void_p), ("stride", c_int64)]


class Rotary(Structure):
    """The frequencies of one rotary embedding."""

    _fields_ = [("inv_freq", c_void_p), ("stride", c_int64), ("num_freqs", c_int32), ("factor", c_float)]


class Group(Structure):
    """The batch as one KV group sees it."""

    _fields_ = [
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("slot_mapping", c_void_p),
        ("first_slots", c_void_p),
        ("table_width", c_int64),
    ]


class Step(Structure):
    """One batch."""

    _fields_ = [
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("seats", c_void_p),
        ("input", c_void_p),
        ("output", c_void_p),
        ("input_stride", c_int64),
        ("output_stride", c_int64),
        ("rotaries", POINTER(Rotary)),
        ("groups", POINTER(Group)),
        ("num_tokens", c_int32),
        ("num_requests", c_int32),
        ("num_groups", c_int32),
        ("num_rotaries", c_int32),
    ]


class LogitRows(Structure):
    """Rows of logits to choose tokens from."""

    _fields_ = [
        ("logits", c_void_p),
        ("stride", c_int64),
        ("at", c_void_p),
        ("temperatures", c_void_p),
        ("seeds", c_void_p),
        ("positions", c_void_p),
        ("num_rows", c_int32),
        ("width", c_int32),
    ]


_STRUCTURES: tuple[type[Structure], ...] = (Matrix, Lora, Attention, Op, Buffer, Rotary, Group, Step, LogitRows)
_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "hb_struct_sizes": (None, [c_void_p]),
    "hb_runs_here": (c_int, [c_char_p]),
    "hb_panel": (c_int, [c_char_p]),
    "hb_slice_rows": (c_int, []),
    "hb_engine_new": (c_void_p, [c_char_p, c_int]),
    "hb_engine_free": (None, [c_void_p]),
    "hb_panel_bytes": (c_int64, [c_void_p, c_int, c_int]),
    "hb_pack": (None, [c_void_p, c_int, c_void_p, c_int64, c_int, c_int, c_void_p]),
    "hb_quantize_q8_0": (None, [c_void_p, c_void_p, c_int, c_int, c_void_p]),
    "hb_run": (None, [c_void_p, POINTER(Op), c_int, POINTER(Buffer), POINTER(Step)]),
    "hb_best": (None, [c_void_p, POINTER(LogitRows), c_void_p, c_void_p]),
    "hb_noisy_best": (None, [c_void_p, POINTER(LogitRows), c_void_p]),
    "hb_gumbel_noise": (None, [c_void_p, POINTER(LogitRows), c_void_p, c_int, c_void_p]),
    "hb_ordered_top": (None, [c_void_p, POINTER(LogitRows), c_int, c_void_p, c_void_p]),
    "hb_log_normaliser": (None, [c_void_p, POINTER(LogitRows), c_void_p]),
    "hb_rank": (None, [c_void_p, POINTER(LogitRows), c_void_p, c_void_p]),
    "hb_read_bytes_per_s": (c_double, [c_void_p, c_void_p, c_int64, c_int]),
    "hb_flops_per_s": (c_double, [c_void_p, c_int]),
}


def declare(library: CDLL) -> CDLL:
    """The library with the types of its functions. OSError when it is not the one that this file describes."""
    for name, (result, arguments) in _FUNCTIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise OSError(f"{library._name} has no {name}") from None
        function.restype, function.argtypes = result, arguments
    sizes = (c_int64 * len(_STRUCTURES))()
    library.hb_struct_sizes(sizes)
    for size, structure in zip(sizes, _STRUCTURES, strict=True):
        if size != sizeof(structure):
            raise OSError(f"{library._name}: {structure.__name__} has {size} bytes, {sizeof(structure)} are expected")
    return library
