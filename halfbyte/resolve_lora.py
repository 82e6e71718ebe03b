"""Which adapters there may be, and which are there from the start. The part of `resolve()` for `LoraConfig`, as pure.

Flags that mean nothing without `--enable-lora` are refused without it. Knows options; knows no files and no models. Called by
`resolve`.
"""

from __future__ import annotations

from halfbyte.adapters import parse_lora_module
from halfbyte.config import EngineOptions, LoraConfig
from halfbyte.errors import Refusal, UserError
from halfbyte.resolve_execution import Picker

DEFAULT_MAX_LORAS = 4
DEFAULT_MAX_LORA_RANK = 16
MOST_LORAS = 1024
MOST_LORA_RANK = 512


def lora_refusals(options: EngineOptions) -> list[Refusal]:
    """What does not go together with adapters."""
    found = []
    if not options.enable_lora:
        given = [name for name in ("lora_modules", "max_loras", "max_lora_rank") if getattr(options, name) is not None]
        for name in given:
            found.append(Refusal(f"--{name.replace('_', '-')} needs --enable-lora", "add it"))
    elif options.compile != "none":
        found.append(Refusal(f"--compile {options.compile} does not compile adapters", "leave it out, or --enable-lora"))
    return found


def resolve_lora(options: EngineOptions, pick: Picker) -> LoraConfig | None:
    """None without `--enable-lora`. UserError for modules that are too many, or named twice."""
    if not options.enable_lora:
        return None
    given = options.lora_modules or ()
    modules = tuple(parse_lora_module(module) for module in ([given] if isinstance(given, str) else given))
    names = [module.name for module in modules]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UserError(f"--lora-modules names {twice[0]!r} twice", param="lora_modules")
    max_loras = pick("max_loras", options.max_loras, max(DEFAULT_MAX_LORAS, len(modules)))
    if len(modules) > max_loras:
        raise UserError(f"--lora-modules names {len(modules)} adapters, --max-loras is {max_loras}; raise it", param="max_loras")
    max_rank = pick("max_lora_rank", options.max_lora_rank, DEFAULT_MAX_LORA_RANK)
    return LoraConfig(max_loras=max_loras, max_lora_rank=max_rank, modules=modules)
