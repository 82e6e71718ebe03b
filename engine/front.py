"""What a front end loads of a model: its tokenizer and its sampling defaults. No weights, no torch."""

from __future__ import annotations

from dataclasses import dataclass
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


def load_front(options: EngineOptions) -> Front:
    """Locate the model (downloading it if it is named by a hub id) and load its tokenizer."""
    files = find_model(options.model, options)
    tokenizer_files = find_model(options.tokenizer, options) if options.tokenizer else files
    return Front(files, load_tokenizer(tokenizer_files), generation_defaults(files))


def find_model(name: str, options: EngineOptions) -> ModelFiles:
    return locate(name, revision=options.revision, download_dir=options.download_dir, hf_token=options.hf_token)
