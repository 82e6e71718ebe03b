"""What a request wants its answer to look like: `response_format`, `structured_outputs`, and the names these had before.

From fields of the wire to StructuredOutputsParams; what a schema or a grammar may be is `halfbyte.engine.grammar`'s to say.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from halfbyte.entrypoints.openai.protocol import GenerationFields
from halfbyte.errors import UserError
from halfbyte.types import StructuredOutputsParams

# What vLLM called the fields of structured_outputs before.
EARLIER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
}
_FIELDS = StructuredOutputsParams.__struct_fields__

log = logging.getLogger(__name__)


def asked_structure(request: GenerationFields) -> tuple[StructuredOutputsParams | None, str]:
    """(what is asked, the field that asks it). `response_format` goes before `structured_outputs`."""
    if request.response_format is not None:
        asked = _of_response_format(request.response_format)
        if asked is not None:
            return asked, "response_format"
    if request.structured_outputs is not None:
        return _params(request.structured_outputs, "structured_outputs"), "structured_outputs"
    earlier = {name: value for name, value in (request.model_extra or {}).items() if name in EARLIER_NAMES and value is not None}
    if earlier.get("guided_json_object") is False:
        del earlier["guided_json_object"]
    if not earlier:
        return None, ""
    log.warning("%s: use structured_outputs instead", ", ".join(earlier))
    return _params({EARLIER_NAMES[name]: value for name, value in earlier.items()}, next(iter(earlier))), next(iter(earlier))


def _of_response_format(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    param, kind = "response_format", given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=json.dumps(given))
    if kind != "json_schema":
        kinds = "text, json_object, json_schema or structural_tag"
        raise UserError(f"{param}.type must be {kinds}, got {str(kind)[:40]!r}", param=param)
    described = given.get("json_schema")
    if not isinstance(described, Mapping) or not isinstance(described.get("name"), str):
        raise UserError(f'{param} needs json_schema: {{"name": ..., "schema": {{...}}}}', param=param)
    schema = described.get("schema")
    if not isinstance(schema, (Mapping, bool)):
        raise UserError(f"{param}.json_schema.schema must be a JSON schema, an object", param=param)
    if not isinstance(described.get("strict"), (bool, type(None))):
        raise UserError(f"{param}.json_schema.strict must be true or false", param=param)
    return StructuredOutputsParams(json=schema)


def _params(given: Mapping[str, Any], param: str) -> StructuredOutputsParams:
    if unknown := sorted(set(given) - set(_FIELDS)):
        raise UserError(f"{param} has no field {unknown[0][:40]!r}; it takes {', '.join(_FIELDS)}", param=param)
    try:
        return msgspec.convert(dict(given), StructuredOutputsParams)
    except msgspec.ValidationError as error:  # a wrong type, or what the struct itself refuses
        raise UserError(f"{param}: {error}", param=param) from None
