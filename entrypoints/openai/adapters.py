"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: which adapters are served, changed while the server runs.

Routes of operators, with the admin key. Fields and answers are vLLM's; names and paths are checked before the engine hears of
them.
"""

from __future__ import annotations

import logging

from pydantic import BaseModel, ConfigDict
from starlette.responses import PlainTextResponse, Response

from halfbyte.adapters import check_adapter_name, check_adapter_path
from halfbyte.entrypoints.openai.errors import ApiError, HttpError
from halfbyte.entrypoints.openai.frontend import Call, Frontend
from halfbyte.errors import ModelFileError, UnsupportedError, UserError

log = logging.getLogger(__name__)

PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})


class LoadAdapterRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool = False


class UnloadAdapterRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lora_name: str | None = None
    lora_int_id: int | None = None


async def load(frontend: Frontend, call: Call, request: LoadAdapterRequest) -> Response:
    frontend.require_serving()
    frontend.adapters.require_some()
    try:
        if not request.lora_name or not request.lora_path:
            raise UserError("both lora_name and lora_path are needed", param="lora_name" if request.lora_path else "lora_path")
        name = check_adapter_name(request.lora_name, "lora_name")
        path = check_adapter_path(request.lora_path, "lora_path")
        await frontend.adapters.load(name, path, in_place=request.load_inplace)
    except (UserError, ModelFileError, UnsupportedError) as error:
        raise _invalid(error) from None
    log.info("adapter %r loaded from %r", name, path)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(frontend: Frontend, call: Call, request: UnloadAdapterRequest) -> Response:
    frontend.require_serving()
    frontend.adapters.require_some()
    name = request.lora_name
    if not name:
        raise _invalid(UserError("lora_name is needed", param="lora_name"))
    await frontend.adapters.unload(name, request.lora_int_id)
    log.info("adapter %r unloaded", name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _invalid(error: Exception) -> HttpError:
    return HttpError(ApiError(400, "InvalidUserInput", str(error), getattr(error, "param", "lora_path")))
