"""Which adapters the engine holds, and which requests use them: one that was unloaded goes when its last request ends.

Every load has a number of its own, so that requests and cached prefixes of one can never meet another's weights, whatever
both are called. Knows ids and paths; knows no names, no weights and no scheduling. Called by the engine core, between steps.
"""

from __future__ import annotations

from itertools import count

from halfbyte.adapters import LoadedAdapter
from halfbyte.config import LoraConfig
from halfbyte.errors import UserError
from halfbyte.types import AdapterRunner, EngineRequest


class EngineAdapters:
    """At most `max_loras` are loaded at a time. `runner` holds them."""

    def __init__(self, runner: AdapterRunner, max_loras: int) -> None:
        self._runner = runner
        self._max_loras = max_loras
        self._ids = count(1)
        self._loaded: set[int] = set()
        self._adapter_of: dict[str, int] = {}
        self._num_requests: dict[int, int] = {}  # of those that the runner holds

    def load(self, path: str, replaces: int | None = None) -> int:
        """The new adapter's id. replaces: one that is to be unloaded next. Errors, as of `add_adapter`, change nothing."""
        if len(self._loaded - {replaces}) >= self._max_loras:
            raise UserError(
                f"{self._max_loras} adapters are loaded, and --max-loras allows no more; unload one", param="lora_name"
            )
        adapter_id = next(self._ids)
        self._runner.add_adapter(adapter_id, path)
        self._loaded.add(adapter_id)
        self._num_requests[adapter_id] = 0
        return adapter_id

    def unload(self, adapter_id: int) -> None:
        """No request may begin to use it; those that do so already end with it. Ids that are not loaded are ignored."""
        if adapter_id in self._loaded:
            self._loaded.remove(adapter_id)
            self._drop_unused(adapter_id)

    def begin(self, request: EngineRequest) -> str | None:
        """Count a request that has an adapter; why it cannot have it, when that is gone."""
        adapter_id = request.adapter_id
        if adapter_id not in self._loaded:
            return "the adapter of this request was unloaded before the request began"
        self._adapter_of[request.request_id] = adapter_id
        self._num_requests[adapter_id] += 1
        return None

    def end(self, request_id: str) -> None:
        """The request has had its last output, or had no adapter."""
        if (adapter_id := self._adapter_of.pop(request_id, None)) is not None:
            self._num_requests[adapter_id] -= 1
            self._drop_unused(adapter_id)

    def _drop_unused(self, adapter_id: int) -> None:
        if adapter_id not in self._loaded and not self._num_requests[adapter_id]:
            del self._num_requests[adapter_id]
            self._runner.remove_adapter(adapter_id)


def load_adapters(config: LoraConfig | None, runner: AdapterRunner) -> tuple[EngineAdapters | None, list[LoadedAdapter]]:
    """Those of `--lora-modules`; None where there are to be none. Raises the error of the first that cannot be applied."""
    if config is None:
        return None, []
    adapters = EngineAdapters(runner, config.max_loras)
    return adapters, [
        LoadedAdapter(module.name, module.path, adapters.load(module.path), module.base_model_name) for module in config.modules
    ]
