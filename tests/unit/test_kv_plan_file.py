"""The file of `--kv-cache-plan`: what is written is read back, and what is no plan is an error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfbyte.engine.kv_plan import VERSION, read_plan, write_plan
from halfbyte.errors import UserError

LAYERS = ["kv4", "k:fp8_e4m3,v:nvfp4", "bfloat16"]


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, LAYERS, {"model": "m", "kl": 0.01})
    assert read_plan(path) == LAYERS
    assert json.loads(path.read_text()) == {"version": VERSION, "layers": LAYERS, "model": "m", "kl": 0.01}


@pytest.mark.parametrize(
    "content",
    [
        [],
        LAYERS,
        {},
        {"version": VERSION},
        {"layers": LAYERS},
        {"version": VERSION, "layers": []},
        {"version": VERSION, "layers": "kv4"},
        {"version": VERSION, "layers": ["kv4", 4]},
        {"version": VERSION, "layers": {"0": "kv4"}},
        {"version": VERSION + 1, "layers": LAYERS},
        {"version": str(VERSION), "layers": LAYERS},
    ],
)
def test_what_is_no_plan(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"{path} is no plan of version {VERSION}; make one with halfbyte kv-tune") as caught:
        read_plan(path)
    assert caught.value.param == "kv_cache_plan"


@pytest.mark.parametrize("content", [b"{", b"layers: [kv4]", b"\xff\xfe", b""])
def test_what_is_no_json(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"cannot read --kv-cache-plan {path}: "):
        read_plan(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read --kv-cache-plan .*No such file"):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(UserError, match="cannot read --kv-cache-plan .*directory"):
        read_plan(tmp_path)
