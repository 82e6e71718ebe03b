"""What a front end loads of a model: its tokenizer and its sampling defaults. No weights, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.config import EngineOptions
from halfbyte.engine.tokenizer import Tokenizer, load_tokenizer
from halfbyte.model_runner.source import ModelFiles, generation_defaults, locate


@dataclass(frozen=True, slots=True)
class Front:
    """files: where the model is. default_sampling: SamplingParams fields that its generation_config sets."""

    files: ModelFiles
    tokenizer: Tokenizer
    default_sampling: dict[str, Any]


def load_front(options: EngineOptions, generation_config: str = "auto") -> Front:
    """Locate the model (downloading it if it is named by a hub id) and load its tokenizer.

    generation_config: "auto" takes the model's own sampling defaults, "vllm" none, a folder or file those that it holds.
    """
    files = find_model(options.model, options)
    tokenizer_files = find_model(options.tokenizer, options) if options.tokenizer else files
    return Front(files, load_tokenizer(tokenizer_files), _sampling_defaults(files, generation_config))


def _sampling_defaults(files: ModelFiles, generation_config: str) -> dict[str, Any]:
    if generation_config == "vllm":
        return {}
    return generation_defaults(files, None if generation_config == "auto" else Path(generation_config))


def find_model(name: str, options: EngineOptions) -> ModelFiles:
    return locate(name, revision=options.revision, download_dir=options.download_dir, hf_token=options.hf_token)
