"""Halfbyte: an LLM inference engine.

The code lives in five folders beside this one (`engine/ kernels/ kvcache/ model_runner/ entrypoints/`) and is imported as
`halfbyte.engine`, `halfbyte.kernels`, and so on. An installed wheel has them inside this package; in a checkout the
repository root is appended to `__path__`, so that bare `pytest` and `python -c "import halfbyte"` work at the root.

Importing this package imports no torch and reads no model: `LLM` and its companions are loaded on first use.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfbyte.adapters import LoRARequest as LoRARequest
    from halfbyte.entrypoints.beam_search import BeamSearchParams as BeamSearchParams
    from halfbyte.entrypoints.llm import LLM as LLM
    from halfbyte.entrypoints.llm import CompletionOutput as CompletionOutput
    from halfbyte.entrypoints.llm import RequestOutput as RequestOutput
    from halfbyte.pooling import PoolingParams as PoolingParams
    from halfbyte.types import SamplingParams as SamplingParams
    from halfbyte.types import StructuredOutputsParams as StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "kvcache").is_dir() and (_ROOT / "pyproject.toml").is_file():
    __path__.append(str(_ROOT))

_LAZY = {
    "LLM": "halfbyte.entrypoints.llm",
    "BeamSearchParams": "halfbyte.entrypoints.beam_search",
    "CompletionOutput": "halfbyte.entrypoints.llm",
    "LoRARequest": "halfbyte.adapters",
    "RequestOutput": "halfbyte.entrypoints.llm",
    "PoolingParams": "halfbyte.pooling",
    "SamplingParams": "halfbyte.types",
    "StructuredOutputsParams": "halfbyte.types",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'halfbyte' has no attribute {name!r}")
