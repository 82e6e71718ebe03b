"""Which readers exist, by name; and which architectures want another than the one for generative chat models.

To add one: a file in this folder and a line in `READERS`.
"""

from __future__ import annotations

from importlib import import_module

from halfbyte.entrypoints.decisions.labels import LabelTrees
from halfbyte.entrypoints.decisions.prompts import PromptMaker
from halfbyte.entrypoints.decisions.reading import Reader

DEFAULT_READER = "next_token"

READERS: dict[str, str] = {
    DEFAULT_READER: "halfbyte.entrypoints.decisions.readers.next_token:NextToken",
    "lfm2": "halfbyte.entrypoints.decisions.readers.lfm2:Lfm2",
}

READER_OF_ARCHITECTURE: dict[str, str] = {
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2",
    "Lfm2VlForConditionalGeneration": "lfm2",
}


def make_reader(name: str, prompts: PromptMaker, labels: LabelTrees) -> Reader:
    module, _, attribute = READERS[name].partition(":")
    made: Reader = getattr(import_module(module), attribute)(prompts, labels)
    return made
