"""The adapters of an `LLM`: loaded when a call first names them, unloaded for others when there is no room for more.

Knows what callers asked and what the engine holds; knows no files. Called by `LLM` before it makes requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.adapters import LoRARequest
from halfbyte.engine.client import EngineClient, carry_out
from halfbyte.engine.messages import LoadAdapter, UnloadAdapter
from halfbyte.errors import UserError

LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


@dataclass(frozen=True, slots=True)
class _Held:
    path: str
    adapter_id: int


class OfflineAdapters:
    """Those of one engine, by name, the least recently used first."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._max_loras = client.info.max_loras
        self._held = {adapter.name: _Held(adapter.path, adapter.adapter_id) for adapter in client.info.adapters}

    def of_prompts(self, given: LoRARequests, num_prompts: int) -> list[tuple[LoRARequest | None, int]]:
        """(request, adapter id) of each prompt. UserError for what is no such request; errors of loading as they are."""
        requests = [given] * num_prompts if given is None or isinstance(given, LoRARequest) else list(given)
        if len(requests) != num_prompts:
            raise UserError(f"{num_prompts} prompts but {len(requests)} lora_requests", param="lora_request")
        wanted: dict[str, LoRARequest] = {}
        for request in requests:
            if request is not None:
                self._check(request)
                if wanted.setdefault(request.lora_name, request) != request:
                    raise UserError(f"lora_name {request.lora_name!r} stands for two adapters in one call", param="lora_request")
        for request in wanted.values():
            self._hold(request, frozenset(wanted))
        return [(request, 0 if request is None else self._held[request.lora_name].adapter_id) for request in requests]

    def _check(self, request: LoRARequest) -> None:
        if not isinstance(request, LoRARequest):
            raise UserError(f"lora_request must be a LoRARequest, got {type(request).__name__}", param="lora_request")
        if not self._max_loras:
            raise UserError("lora_request needs LLM(enable_lora=True)", param="lora_request")
        held = self._held.get(request.lora_name)
        if held is not None and not request.load_inplace and held.path != request.lora_path:
            raise UserError(
                f"lora_name {request.lora_name!r} stands for another adapter already; give it another name, or load_inplace=True",
                param="lora_request",
            )

    def _hold(self, request: LoRARequest, wanted: frozenset[str]) -> None:
        """Have the adapter loaded, in the place of one that this call does not want where there is no other."""
        held = self._held.pop(request.lora_name, None)
        if held is None or request.load_inplace:
            unwanted = [name for name in self._held if name not in wanted]
            if held is None and len(self._held) >= self._max_loras and unwanted:
                carry_out(self._client, UnloadAdapter(self._held.pop(unwanted[0]).adapter_id))
            replaced = None if held is None else held.adapter_id
            done = carry_out(self._client, LoadAdapter(request.lora_path, replaced))
            if replaced is not None:
                carry_out(self._client, UnloadAdapter(replaced))
            held = _Held(request.lora_path, done.adapter_id)
        self._held[request.lora_name] = held
