"""Which reasoning syntaxes exist: name on the command line -> the marks of a family, or where its class is.

`think` is for models that no other name is made for: its marks come from --reasoning-config.
"""

from __future__ import annotations

from halfbyte.entrypoints.reasoning_parsers.think_tags import Tags

_GRANITE = Tags(("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:"))

REASONING_PARSERS: dict[str, Tags | str] = {
    "deepseek_r1": Tags(assumed=True),
    "deepseek_v3": Tags(),
    "ernie45": Tags(),
    "glm45": Tags(),
    "glm47": Tags(),
    "gpt_oss": "halfbyte.entrypoints.tool_parsers.harmony:Harmony",
    "granite": _GRANITE,
    "hf": "halfbyte.entrypoints.tool_parsers.hf:ResponseTemplateSyntax",
    "holo2": Tags(),
    "kimi_k2": Tags(),
    "minimax_m2": Tags(assumed=True),
    "mistral": Tags(("[THINK]",), ("[/THINK]",)),
    "nemotron_v3": Tags(),
    "olmo3": Tags(assumed=True),
    "openai_gptoss": "halfbyte.entrypoints.tool_parsers.harmony:Harmony",
    "qwen3": Tags(),
    "seed_oss": Tags(("<seed:think>",), ("</seed:think>",)),
    "step3": Tags(assumed=True),
    "think": Tags(),
}
