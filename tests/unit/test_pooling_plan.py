"""What checkpoints say of pooling, and what becomes of a model with --runner and --convert: read from files, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfbyte.config import EngineOptions
from halfbyte.errors import HalfbyteError, UnsupportedError, UserError
from halfbyte.model_runner.pooling_plan import HeadStep, PoolingPlan, plan_pooling
from halfbyte.model_runner.source import ModelFiles
from halfbyte.pooling import PoolingInfo, PoolingParams

ST = "sentence_transformers.models."


def plan(folder: Path, config: dict[str, Any], **options: Any) -> PoolingPlan | None:
    (folder / "config.json").write_text(json.dumps(config))
    return plan_pooling(ModelFiles("m", "hf", folder), EngineOptions(**options))


def write_modules(folder: Path, *kinds: str, pooling: dict[str, Any] | None = None, **changes: Any) -> None:
    paths = ["" if kind == "Transformer" else f"{i}_{kind}" for i, kind in enumerate(kinds)]
    modules = [
        {"idx": i, "path": path, "type": ST + kind} | changes for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in paths[1:]:
        (folder / path).mkdir(exist_ok=True)
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {"pooling_mode_mean_tokens": True}))


GENERATING, ENCODER, CLASSIFIER = (
    {"architectures": [name]} for name in ("Qwen3ForCausalLM", "BertModel", "Qwen3ForSequenceClassification")
)


@pytest.mark.parametrize(
    ("config", "options", "task"),
    [
        (GENERATING, {}, None),
        (GENERATING, {"runner": "generate"}, None),
        (GENERATING, {"runner": "pooling"}, "embed"),
        (GENERATING, {"convert": "embed"}, "embed"),
        (GENERATING, {"hf_overrides": {"classifier_from_token": ["a", "b"]}}, "classify"),
        ({"architectures": ["Qwen3Model"]}, {}, "embed"),
        ({"architectures": ["Gemma3TextModel"]}, {}, None),
        (ENCODER, {}, "embed"),
        (ENCODER, {"runner": "pooling", "convert": "none"}, "embed"),
        (CLASSIFIER, {}, "classify"),
        (CLASSIFIER, {"convert": "embed"}, "embed"),
        ({}, {}, None),
    ],
)
def test_what_a_model_is_for(tmp_path: Path, config: dict[str, Any], options: dict[str, Any], task: str | None) -> None:
    found = plan(tmp_path, config, **options)
    assert (None if found is None else found.task) == task


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (ENCODER, {"runner": "generate"}, "--runner generate: BertModel does not generate text"),
        (CLASSIFIER, {"runner": "generate"}, "does not generate text"),
        (GENERATING, {"runner": "generate", "convert": "embed"}, "--convert embed is for --runner pooling"),
        (GENERATING, {"convert": "classify"}, "the checkpoint has no classifier"),
        (GENERATING, {"runner": "pooling", "convert": "none"}, "use --convert embed"),
        (GENERATING, {"runner": "draft"}, "--runner must be one of auto, generate, pooling"),
        (GENERATING, {"hf_overrides": {"classifier_from_token": "no"}}, "must be a list of tokens"),
        (CLASSIFIER, {"hf_overrides": {"is_original_qwen3_reranker": True}}, "classifier_from_token"),
    ],
)
def test_what_cannot_be(tmp_path: Path, config: dict[str, Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        plan(tmp_path, config, **options)


def test_modules_of_sentence_transformers(tmp_path: Path) -> None:
    write_modules(tmp_path, "Transformer", "Pooling", "Dense", "Normalize", pooling={"pooling_mode_lasttoken": True})
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps({"activation_function": "torch.nn.modules.linear.Identity"}))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    found = plan(tmp_path, GENERATING)
    assert found is not None
    assert (found.mode, found.normalizes, found.max_tokens) == ("last", True, 256)
    assert found.steps == (HeadStep("linear", "identity", folder="2_Dense"),)
    write_modules(tmp_path, "Transformer", "Pooling", pooling={"pooling_mode": "cls"})  # as later versions write it
    assert (later := plan(tmp_path, ENCODER)) is not None and (later.mode, later.normalizes) == ("cls", False)


@pytest.mark.parametrize(
    ("kinds", "pooling", "words"),
    [
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, "pooling max is not supported"),
        (("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "cls with mean"),
        (("Transformer", "Pooling", "LSTM"), None, "modules.json: Transformer, Pooling, LSTM"),
        (("Transformer", "Pooling", "Normalize", "Dense"), None, "modules.json: Transformer, Pooling, Normalize, Dense"),
        (("Transformer",), None, "modules.json: Transformer; possible"),
        (("WordEmbeddings", "Pooling"), None, "modules.json: WordEmbeddings"),
    ],
)
def test_modules_that_are_not_known_are_named(
    tmp_path: Path, kinds: tuple[str, ...], pooling: dict[str, Any] | None, words: str
) -> None:
    write_modules(tmp_path, *kinds, pooling=pooling)
    with pytest.raises(UnsupportedError, match=words):
        plan(tmp_path, ENCODER)


@pytest.mark.parametrize("path", ["..", "../other", "a/b", "/etc", 5])
def test_folders_of_modules_lie_beside_them(tmp_path: Path, path: Any) -> None:
    write_modules(tmp_path, "Transformer", "Pooling", path=path)
    with pytest.raises(HalfbyteError, match="folder beside it|cannot be read|lies in"):
        plan(tmp_path, ENCODER)


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 3}, "softmax"),
        ({"id2label": {"0": "a"}}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "identity"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
    ],
)
def test_activations_of_classifiers(tmp_path: Path, config: dict[str, Any], activation: str) -> None:
    found = plan(tmp_path, {"architectures": ["BertForSequenceClassification"]} | config)
    assert found is not None and found.activation == activation


def test_an_activation_that_is_code_of_somebody_is_refused(tmp_path: Path) -> None:
    stored = {"sentence_transformers": {"activation_fn": "os.system"}}
    with pytest.raises(UnsupportedError, match=r"activation 'os.system' is not supported"):
        plan(tmp_path, CLASSIFIER | {"num_labels": 1} | stored)


def test_dimensions_are_for_models_that_say_so() -> None:
    info = PoolingInfo(task="embed", mode="last", size=8, activates=True)
    with pytest.raises(UserError, match="is_matryoshka"):
        info.ask(PoolingParams(dimensions=4), "embed")
    info.matryoshka = [4, 8]
    assert info.ask(PoolingParams(dimensions=4), "embed").dimensions == 4
    with pytest.raises(UserError, match="one of 4, 8"):
        info.ask(PoolingParams(dimensions=5), "embed")
    info.matryoshka = []
    assert info.ask(PoolingParams(dimensions=5), "token_embed").reads_all
    with pytest.raises(UserError, match="from 1 to 8"):
        info.ask(PoolingParams(dimensions=9), "embed")
