"""What the operator says about structured answers: the value of --structured-outputs-config, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from halfbyte.engine.grammar.json_schema import GrammarOptions, json_style
from halfbyte.errors import UserError

FLAG = "--structured-outputs-config"
_BACKENDS = ("auto", "guidance")
_SWITCHES = ("disable_any_whitespace", "disable_additional_properties", "enable_in_reasoning")


@dataclass(frozen=True, slots=True)
class StructureSettings:
    """enable_in_reasoning: a grammar holds from the first token on, thoughts included (there are none then)."""

    options: GrammarOptions = field(default_factory=GrammarOptions)
    enable_in_reasoning: bool = False

    @classmethod
    def from_config(cls, given: Mapping[str, Any]) -> StructureSettings:
        """UserError names what is unknown or of the wrong kind."""
        for name, value in given.items():
            if name == "backend":
                if value not in _BACKENDS:
                    raise UserError(f"{FLAG}: backend {value!r} does not exist here; it is one of {', '.join(_BACKENDS)}")
            elif name in _SWITCHES:
                if not isinstance(value, bool):
                    raise UserError(f"{FLAG}: {name} must be true or false, got {value!r}")
            elif name == "whitespace_pattern":
                if not isinstance(value, str):
                    raise UserError(f"{FLAG}: {name} must be a text, got {value!r}")
            else:
                raise UserError(f"{FLAG} has no {name!r}; it takes backend, whitespace_pattern, {', '.join(_SWITCHES)}")
        names = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
        options = GrammarOptions(**{name: given[name] for name in names if name in given})
        json_style(options, FLAG)  # what is wrong with a pattern would be an error of every request
        return cls(options, given.get("enable_in_reasoning", False))
