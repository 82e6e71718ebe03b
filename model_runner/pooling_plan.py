"""What becomes of a model's hidden states when it pools: which of them count, what they pass through, and what comes out.

Reads what checkpoints say of that (`modules.json` of sentence-transformers with its folders, the classifiers of transformers'
configurations) and decides whether a model generates or pools. Trusts no name in them. It must not know weights, devices or
torch. Called at start; the engine's runners and front ends read the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from halfbyte.config import EngineOptions
from halfbyte.errors import ModelFileError, Refusal, UnsupportedError, UserError
from halfbyte.model_runner.models import ENCODERS
from halfbyte.model_runner.source import ModelFiles, read_json, read_optional_json
from halfbyte.pooling import CONVERSIONS, RUNNERS, PoolingInfo, PoolingMode

# Keys of hf_overrides that are about pooling, beside those of the model's configuration
OVERRIDES = ("is_matryoshka", "matryoshka_dimensions", "classifier_from_token", "is_original_qwen3_reranker")
CLASSIFIER = "ForSequenceClassification"
MAX_LABELS = 100_000

_MODES: Mapping[str, PoolingMode] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = ("identity", "tanh", "relu", "gelu", "sigmoid", "softmax", "silu")


@dataclass(frozen=True, slots=True)
class HeadStep:
    """What a pooled state passes through: a linear layer and an activation, or a layer norm.

    prefix: of its tensors' names. folder: where they lie, below the model's; "" for its own files. eps: of a norm, else None.
    """

    prefix: str
    activation: str = "identity"
    folder: str = ""
    eps: float | None = None


class Vocabulary(Protocol):
    """What of a tokenizer is needed here."""

    def token_id(self, text: str) -> int | None: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingPlan:
    """mode: whose states count. is_encoder: texts are read whole, without a cache. steps: what states pass through, in float32.

    reads_both_ways: the encoder is made of a decoder's layers. normalizes: whether embeddings have length 1 unless a request says
    otherwise. activation: what makes a classifier's numbers probabilities: sigmoid, softmax, or identity. classes: tokens whose
    logits are a classifier's numbers, in place of steps; difference: the two are one number, the second less the first.
    max_tokens: what sentence-transformers would read of a text.
    """

    task: Literal["embed", "classify"]
    mode: PoolingMode
    is_encoder: bool = False
    reads_both_ways: bool = False
    steps: tuple[HeadStep, ...] = ()
    normalizes: bool = False
    activation: str = "identity"
    labels: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    difference: bool = False
    matryoshka: tuple[int, ...] | None = None
    max_tokens: int | None = None

    def class_ids(self, tokenizer: Vocabulary) -> list[int]:
        """The token ids of `classes`. UserError for a text that is not one token."""
        found = []
        for text in self.classes:
            token_id = tokenizer.token_id(text)
            ids = tokenizer.encode(text, add_special_tokens=False) if token_id is None else [token_id]
            if len(ids) != 1:
                raise UserError(f"classifier_from_token: {text!r} is {len(ids)} tokens here, one is needed", param="hf_overrides")
            found += ids
        return found

    def info(self, size: int) -> PoolingInfo:
        """size: of its vectors."""
        pairs: Literal["tokenizer", "qwen3_reranker"] | None = None
        if self.task == "classify":
            pairs = "qwen3_reranker" if self.difference else "tokenizer"
        return PoolingInfo(
            task=self.task,
            mode=self.mode,
            size=size,
            activates=self.normalizes if self.task == "embed" else True,
            matryoshka=None if self.matryoshka is None else list(self.matryoshka),
            labels=list(self.labels),
            pairs=pairs,
        )


def model_overrides(options: EngineOptions, plan: PoolingPlan | None) -> dict[str, Any]:
    """Those of hf_overrides that are for the model's configuration. A model that generates has no others."""
    return {key: value for key, value in (options.hf_overrides or {}).items() if plan is None or key not in OVERRIDES}


def plan_pooling(files: ModelFiles, options: EngineOptions) -> PoolingPlan | None:
    """How the model pools, None when it is to generate.

    UserError when --runner or --convert asks for what the checkpoint is not; UnsupportedError names a module that is not known.
    """
    for name, given, possible in (("runner", options.runner, RUNNERS), ("convert", options.convert, CONVERSIONS)):
        if given not in possible:
            raise UserError(f"--{name} must be one of {', '.join(possible)}, got {given!r}", param=name)
    overrides = options.hf_overrides or {}
    values = (read_json(files.path / "config.json") if files.kind == "hf" else {}) | dict(overrides)
    named = values.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    reader = _Reader(files, values, architecture)
    task = _task(options, reader)
    if task is None:
        return None
    return reader.embedding() if task == "embed" else reader.classifier()


def _task(options: EngineOptions, reader: _Reader) -> Literal["embed", "classify"] | None:
    """What the model is for, by its files and by what is asked of it."""
    natural, runner, convert = reader.natural_task, options.runner, options.convert
    if runner == "generate":
        if natural is not None and not reader.can_generate:
            raise UserError(f"--runner generate: {reader.architecture} does not generate text; leave it out", param="runner")
        if convert not in ("auto", "none"):
            raise UserError(f"--convert {convert} is for --runner pooling", param="convert")
        return None
    if convert == "embed":
        return "embed"
    if convert == "classify":
        if not reader.has_classifier:
            raise UserError(
                "--convert classify: the checkpoint has no classifier; name tokens that stand for classes with "
                '--hf-overrides \'{"classifier_from_token": ["no", "yes"]}\'',
                param="convert",
            )
        return "classify"
    if natural is None and runner == "pooling":
        if convert == "none":
            raise UserError(f"--convert none: {reader.architecture} is no pooling model; use --convert embed", param="convert")
        return "embed"
    return natural


class _Reader:
    """What one checkpoint says."""

    def __init__(self, files: ModelFiles, values: Mapping[str, Any], architecture: str) -> None:
        self.folder = files.path if files.kind == "hf" else None
        self.values = values
        self.architecture = architecture
        self._where = files.path
        self._reads_both_ways = bool(values.get("use_bidirectional_attention"))
        self.is_encoder = architecture in ENCODERS or self._reads_both_ways

    @property
    def _usual_mode(self) -> PoolingMode:
        if self._reads_both_ways:
            return "mean"
        return "cls" if self.is_encoder else "last"

    @property
    def has_modules(self) -> bool:
        return self.folder is not None and (self.folder / "modules.json").is_file()

    @property
    def has_classifier(self) -> bool:
        return self.architecture.endswith(CLASSIFIER) or bool(self.values.get("classifier_from_token"))

    @property
    def can_generate(self) -> bool:
        return not (self.is_encoder or self._is_bare or self.architecture.endswith(CLASSIFIER))

    @property
    def _is_bare(self) -> bool:
        """Whether it has no head. Gemma's text model is named so, and generates."""
        return self.architecture.endswith("Model") and not self.architecture.endswith("TextModel")

    @property
    def natural_task(self) -> Literal["embed", "classify"] | None:
        """What the files are for, None for generation."""
        if self.has_classifier:
            return "classify"
        return "embed" if self.has_modules or self.is_encoder or self._is_bare else None

    def embedding(self) -> PoolingPlan:
        mode, steps, normalizes = self._modules() if self.has_modules else (self._usual_mode, [], True)
        return PoolingPlan(
            task="embed",
            mode=mode,
            is_encoder=self.is_encoder,
            reads_both_ways=self._reads_both_ways,
            steps=tuple(steps),
            normalizes=normalizes,
            matryoshka=self._matryoshka(),
            max_tokens=self._max_tokens(),
        )

    def classifier(self) -> PoolingPlan:
        tokens = self.values.get("classifier_from_token")
        difference = bool(self.values.get("is_original_qwen3_reranker"))
        if tokens:
            if not isinstance(tokens, list) or not all(isinstance(token, str) and token for token in tokens):
                raise UserError(f"classifier_from_token must be a list of tokens, got {tokens!r}", param="hf_overrides")
            if self.is_encoder:
                raise UserError(
                    f"classifier_from_token: {self.architecture} makes no logits of tokens; leave it out", param="hf_overrides"
                )
            if difference and len(tokens) != 2:
                raise UserError("is_original_qwen3_reranker wants two tokens in classifier_from_token", param="hf_overrides")
            labels, steps = ([tokens[1]] if difference else tokens), []
        elif difference:
            raise UserError('is_original_qwen3_reranker wants "classifier_from_token": ["no", "yes"]', param="hf_overrides")
        else:
            labels, steps = self._labels(), self._classifier_steps()
        return PoolingPlan(
            task="classify",
            mode=self._classifier_mode(),
            is_encoder=self.is_encoder,
            reads_both_ways=self._reads_both_ways,
            steps=tuple(steps),
            activation=self._activation(len(labels)),
            labels=tuple(labels),
            classes=tuple(tokens or ()),
            difference=difference,
            max_tokens=self._max_tokens(),
        )

    def _modules(self) -> tuple[PoolingMode, list[HeadStep], bool]:
        """(whose states count, what they pass through, whether the result is normalised) by modules.json."""
        assert self.folder is not None
        path = self.folder / "modules.json"
        modules = _module_list(path)
        kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
        behind = kinds[2:]
        normalizes = behind[-1:] == ["Normalize"]
        if kinds[:2] != ["Transformer", "Pooling"] or set(behind[: len(behind) - normalizes]) - {"Dense"}:
            raise self._refuse(
                f"modules.json: {', '.join(kinds)}", "possible are Transformer, Pooling, any number of Dense, and Normalize"
            )
        folders = [module.get("path", "") for module in modules]
        for folder in folders:
            if not isinstance(folder, str) or folder == ".." or (folder and Path(folder).name != folder):
                raise ModelFileError(f"{path}: {folder!r} is not the name of a folder beside it")
        if folders[0]:
            raise self._refuse(f"modules.json: the model lies in {folders[0]!r}", "move its files beside modules.json")
        mode = self._mode(self.folder / folders[1] / "config.json")
        dense = [_dense(self.folder, folder) for kind, folder in zip(kinds, folders, strict=True) if kind == "Dense"]
        return mode, dense, normalizes

    def _mode(self, path: Path) -> PoolingMode:
        config = read_json(path)
        named = config.get("pooling_mode")
        modes = (
            [named] if isinstance(named, str) else list(named or ()) or [m for key, m in _OLD_MODES.items() if config.get(key)]
        )
        if len(modes) == 1 and modes[0] in _MODES:
            return _MODES[modes[0]]
        words = " with ".join(map(str, modes)) or "none"
        raise UnsupportedError(Refusal(f"{path}: pooling {words} is not supported", f"possible are {', '.join(_MODES)}"))

    def _labels(self) -> list[str]:
        named = self.values.get("id2label")
        count = self.values.get("num_labels")
        if isinstance(named, Mapping):
            count = len(named)
        count = 2 if count is None else count
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_LABELS:
            raise ModelFileError(f"{self._where}: num_labels must be from 1 to {MAX_LABELS}, got {count!r}")
        names = {str(key): value for key, value in named.items()} if isinstance(named, Mapping) else {}
        return [str(names.get(str(i), f"LABEL_{i}")) for i in range(count)]

    def _classifier_steps(self) -> list[HeadStep]:
        eps = self.values.get("norm_eps", self.values.get("layer_norm_eps", 1e-5))
        activation = _activation(str(self.values.get("classifier_activation", "gelu")), self._where, ACTIVATIONS)
        match self.architecture.removesuffix(CLASSIFIER):
            case "Bert":
                return [HeadStep("bert.pooler.dense", "tanh"), HeadStep("classifier")]
            case "Roberta" | "XLMRoberta":
                return [HeadStep("classifier.dense", "tanh"), HeadStep("classifier.out_proj")]
            case "DistilBert":
                return [HeadStep("pre_classifier", "relu"), HeadStep("classifier")]
            case "ModernBert":
                norm = HeadStep("head.norm", eps=float(eps))
                return [HeadStep("head.dense", activation), norm, HeadStep("classifier")]
        return [HeadStep("score")]

    def _classifier_mode(self) -> PoolingMode:
        if self.architecture == f"ModernBert{CLASSIFIER}":
            named = self.values.get("classifier_pooling", "cls")
            if named not in ("cls", "mean"):
                raise self._refuse(f"classifier_pooling {named!r} is not supported", "possible are cls, mean")
            return "cls" if named == "cls" else "mean"
        return self._usual_mode

    def _activation(self, num_labels: int) -> str:
        """As sentence-transformers stores it, else by the kind of problem, else by the number of labels."""
        stored = self.values.get("sentence_transformers")
        named = stored.get("activation_fn") if isinstance(stored, Mapping) else None
        named = named or self.values.get("sbert_ce_default_activation_function")
        if named:
            return _activation(str(named), self._where, ("identity", "sigmoid", "softmax"))
        by_problem = {"regression": "identity", "multi_label_classification": "sigmoid"}
        usual = "sigmoid" if num_labels == 1 else "softmax"
        return by_problem.get(str(self.values.get("problem_type")), usual)

    def _matryoshka(self) -> tuple[int, ...] | None:
        sizes = self.values.get("matryoshka_dimensions")
        if sizes:
            if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
                raise UserError(f"matryoshka_dimensions must be a list of positive numbers, got {sizes!r}", param="hf_overrides")
            return tuple(sizes)
        return () if self.values.get("is_matryoshka") else None

    def _max_tokens(self) -> int | None:
        """The longest text of sentence-transformers, None where it does not say."""
        if self.folder is None:
            return None
        path = self.folder / "sentence_bert_config.json"
        config = read_optional_json(path)
        if config.get("do_lower_case"):
            raise self._refuse("do_lower_case in sentence_bert_config.json", "set it to false if the tokenizer lowers by itself")
        length = config.get("max_seq_length")
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            raise ModelFileError(f"{path}: max_seq_length must be a positive number, got {length!r}")
        return length

    def _refuse(self, reason: str, fix: str = "") -> UnsupportedError:
        return UnsupportedError(Refusal(f"{self._where}: {reason}", fix))


def _module_list(path: Path) -> list[Mapping[str, Any]]:
    """The modules, in their order. The file holds a list where others hold an object."""
    import json

    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}") from None
    if not isinstance(modules, list) or not modules or not all(isinstance(module, dict) for module in modules):
        raise ModelFileError(f"{path} must hold a list of modules")
    return modules


def _dense(folder: Path, name: str) -> HeadStep:
    path = folder / name / "config.json"
    config = read_json(path)
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise UnsupportedError(Refusal(f"{path}: {key} {config[key]!r} is not supported", ""))
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    return HeadStep("linear", _activation(str(activation), path, ACTIVATIONS), folder=name)


def _activation(name: str, where: Path, possible: tuple[str, ...]) -> str:
    """A class of torch by its full name, as one of `possible`."""
    short = name.rpartition(".")[2].lower()
    if short not in possible:
        raise UnsupportedError(Refusal(f"{where}: activation {name!r} is not supported", f"possible are {', '.join(possible)}"))
    return short
