"""Typed answers with instructor, in its modes for tools and for JSON schemas, whole and while they are streamed.

Usage: instructor_models.py URL MODEL. Prints what came as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field


class Trip(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=7)
    friends: list[Literal["Ann", "Bob"]] = Field(max_length=2)


def main(url: str, model: str) -> None:
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="unused")
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": "Plan three days in Oslo with Ann."}],
        "max_tokens": 96,
        "temperature": 0,
        "max_retries": 0,
    }
    found = {}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain, mode=mode)
        whole = client.chat.completions.create(response_model=Trip, **asked)
        parts = list(client.chat.completions.create_partial(response_model=Trip, **asked))
        found[mode.name] = {"whole": whole.model_dump(), "streamed": parts[-1].model_dump(), "parts": len(parts)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
