"""Which sampling defaults a front end takes: the model's, none, or an operator's file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfbyte.engine.front import _sampling_defaults
from halfbyte.errors import ModelFileError
from halfbyte.model_runner.source import ModelFiles


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9}))
    return ModelFiles(name="m", kind="hf", path=tmp_path)


def test_auto_takes_the_models_and_vllm_none(files: ModelFiles) -> None:
    assert _sampling_defaults(files, "auto") == {"temperature": 0.6, "top_p": 0.9}
    assert _sampling_defaults(files, "vllm") == {}


def test_a_path_counts_instead(files: ModelFiles, tmp_path: Path) -> None:
    other = tmp_path / "mine.json"
    other.write_text(json.dumps({"temperature": 0.1, "max_new_tokens": 7}))
    assert _sampling_defaults(files, str(other)) == {"temperature": 0.1, "max_tokens": 7}
    assert _sampling_defaults(files, str(tmp_path)) == {"temperature": 0.6, "top_p": 0.9}


def test_a_path_that_holds_nothing_is_an_error(files: ModelFiles, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"gone\.json"):
        _sampling_defaults(files, str(tmp_path / "gone.json"))
