"""Adapters by the names under which they are served, and how that changes while the server runs.

A name stands for one load of an adapter until another takes its place; a request keeps the one that it began with. Changes are
made one after another, and to their end, whoever waits for them. Knows names and ids; knows no HTTP and no files. Owned by
`Frontend`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from halfbyte.adapters import LoadedAdapter
from halfbyte.engine.messages import Answer, LoadAdapter, Order, UnloadAdapter
from halfbyte.errors import NotFoundError, Refusal, UnsupportedError, UserError


class Control(Protocol):
    """The part of `Engine` that is used here."""

    async def control(self, action: Order[Answer]) -> Answer: ...


class ServedAdapters:
    """loaded: those that the engine began with. model_names: what the model itself is called. max_loras: 0 for none at all."""

    def __init__(self, engine: Control, loaded: Sequence[LoadedAdapter], model_names: Sequence[str], max_loras: int) -> None:
        self._engine = engine
        self._model_names = model_names
        self._max_loras = max_loras
        self._by_name: dict[str, LoadedAdapter] = {}
        self._turn = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        for adapter in loaded:
            self._refuse_clash(adapter.name)
            self._by_name[adapter.name] = adapter

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def require_some(self) -> None:
        """UnsupportedError when this server can have none."""
        if not self._max_loras:
            raise UnsupportedError(Refusal("this server has no adapters", "start it with --enable-lora"))

    def all(self) -> list[LoadedAdapter]:
        return list(self._by_name.values())

    def of(self, model: str) -> LoadedAdapter | None:
        """The adapter that `model` names now, None for the model itself. NotFoundError when it was unloaded meanwhile."""
        if model in self._by_name:
            return self._by_name[model]
        if model in self._model_names:
            return None
        raise NotFoundError(f"model {model!r} does not exist any more", param="model")

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Serve the adapter in the folder `path` as `name`. UserError for a name that is taken, and the engine's errors."""
        await self._change(self._load(name, path, in_place))

    async def unload(self, name: str, adapter_id: int | None) -> None:
        """Serve it no more; requests that began with it end with it. NotFoundError when there is none."""
        await self._change(self._unload(name, adapter_id))

    async def _change(self, change: Coroutine[Any, Any, None]) -> None:
        """See it through, even when its client leaves: name and engine would not agree otherwise."""
        task = asyncio.ensure_future(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)

    async def _load(self, name: str, path: str, in_place: bool) -> None:
        async with self._turn:
            self._refuse_clash(name)
            old = self._by_name.get(name)
            if old is not None and not in_place:
                raise UserError(
                    f"an adapter is served as {name!r} already; load_inplace=true puts another in its place",
                    param="lora_name",
                )
            done = await self._engine.control(LoadAdapter(path, None if old is None else old.adapter_id))
            base = None if old is None else old.base_model_name
            self._by_name[name] = LoadedAdapter(name, path, done.adapter_id, base)
            if old is not None:  # told only now: what was sent before has the old one
                await self._engine.control(UnloadAdapter(old.adapter_id))

    async def _unload(self, name: str, adapter_id: int | None) -> None:
        async with self._turn:
            found = self._by_name.get(name)
            if found is None or adapter_id not in (None, found.adapter_id):
                raise NotFoundError(f"no adapter is served as {name!r}", param="lora_name")
            del self._by_name[name]
            await self._engine.control(UnloadAdapter(found.adapter_id))

    def _refuse_clash(self, name: str) -> None:
        if name in self._model_names:
            raise UserError(f"an adapter cannot be called {name!r}, as the model is; choose another name", param="lora_name")
