"""The models by architecture, as `config.json` names them. To add one: a file in this folder and a line in `MODELS`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from halfbyte.errors import Refusal, UnsupportedError

if TYPE_CHECKING:
    from halfbyte.model_runner.layers.model import Model

MODELS: dict[str, str] = {
    "LlamaForCausalLM": "halfbyte.model_runner.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "halfbyte.model_runner.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "halfbyte.model_runner.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "halfbyte.model_runner.models.qwen3:Qwen3ForCausalLM",
    "Gemma3ForCausalLM": "halfbyte.model_runner.models.gemma3:Gemma3ForCausalLM",
    "Gemma3TextModel": "halfbyte.model_runner.models.gemma3:Gemma3ForCausalLM",
}

# Models without a decoder and without a cache, which only pool.
ENCODERS: dict[str, str] = {
    f"{family}{ending}": f"halfbyte.model_runner.models.{module}"
    for family, module in (
        ("Bert", "bert:BertEncoder"),
        ("Roberta", "bert:BertEncoder"),
        ("XLMRoberta", "bert:BertEncoder"),
        ("DistilBert", "bert:DistilBertEncoder"),
        ("ModernBert", "modernbert:ModernBertEncoder"),
    )
    for ending in ("Model", "ForSequenceClassification")
}


def get_model_class(architecture: str) -> type[Model]:
    """The class that runs `architecture`. UnsupportedError when there is none."""
    if architecture not in MODELS:
        raise UnsupportedError(Refusal(f"architecture {architecture} is not supported", f"supported are {', '.join(MODELS)}"))
    module, _, attribute = MODELS[architecture].partition(":")
    found: type[Model] = getattr(import_module(module), attribute)
    return found
