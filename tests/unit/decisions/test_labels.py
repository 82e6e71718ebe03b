"""Labels as tokens: every vocabulary and template that tells them apart can be read, whatever number of tokens they are."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from halfbyte.engine.limits import Limits
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints.chat_template import ChatTemplate
from halfbyte.entrypoints.decisions.decider import Asking, Decider
from halfbyte.entrypoints.decisions.labels import LabelTree, LabelTrees, Unreadable
from halfbyte.entrypoints.decisions.prompts import LONG_CHARS, PromptMaker
from halfbyte.entrypoints.decisions.questions import TYPES, read_questions
from halfbyte.entrypoints.decisions.reading import Readout
from halfbyte.entrypoints.decisions.settings import DecisionSettings
from halfbyte.entrypoints.decisions.temperatures import Temperatures
from halfbyte.errors import UnsupportedError, UserError

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
LIMITS = Limits(vocab_size=400, max_model_len=4096, max_logprobs=20)


class Facts:
    architecture = "LlamaForCausalLM"
    logprobs_mode = "raw_logprobs"
    batch_invariant = True


def byte_tokenizer(*texts: str, template: str | None = TEMPLATE, special: bool = True) -> Tokenizer:
    """One token per byte, and what a BPE learns of `texts`."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + len(texts), initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([text for text in texts for _ in range(9)], trainer)
    if special:
        backend.add_special_tokens(["<|start|>", "<|end|>", "<think>", "</think>"])
    return Tokenizer(backend, chat_template=template)


def decider(tokenizer: Tokenizer, reader: str = "auto", limits: Limits = LIMITS) -> Decider:
    made: list[ChatTemplate] = []

    def template() -> ChatTemplate:
        made.append(made[0] if made else ChatTemplate.for_tokenizer(tokenizer))
        return made[0]

    return Decider(tokenizer, template, limits, Facts(), DecisionSettings(reader=reader), Temperatures())


def prompt_of(tokenizer: Tokenizer, question: str = "x") -> list[int]:
    prompts = PromptMaker(lambda: ChatTemplate.for_tokenizer(tokenizer), tokenizer, LIMITS)
    return prompts.make([{"role": "user", "content": question}]).token_ids


def tree_of(tokenizer: Tokenizer, *labels: str) -> LabelTree:
    trees = LabelTrees(tokenizer, LIMITS.vocab_size)
    return trees.tree(prompt_of(tokenizer), tuple((label,) for label in labels))


def test_labels_of_one_token_are_one_read() -> None:
    tokenizer = byte_tokenizer("yes", "ye")
    tree = tree_of(tokenizer, "A", "yes")
    assert tree.num_replaced == 0 and list(tree.nodes) == [()] and len(tree.nodes[()]) == 2
    [read] = tree.reads([1, 2, 3])
    assert read.prompt_token_ids == [1, 2, 3] and read.token_ids == tree.nodes[()]


def test_f06_labels_of_several_tokens_are_read_behind_each_other() -> None:
    tokenizer = byte_tokenizer()
    tree = tree_of(tokenizer, "yes", "no", "yet")
    texts = {bytes(tokenizer.token_bytes(t)[0] for t in node).decode(): len(children) for node, children in tree.nodes.items()}
    assert texts == {"": 2, "y": 1, "ye": 2, "n": 1}
    assert [read.prompt_token_ids[1:] for read in tree.reads([9])] == [list(node) for node in tree.nodes]


def test_f06_a_token_that_spans_the_end_of_the_prompt_is_read_anew() -> None:
    tokenizer = byte_tokenizer("\nyes", "\nye", "\ny", template=TEMPLATE)
    tree = tree_of(tokenizer, "yes", "no")
    assert tree.num_replaced == 1
    assert all(tokenizer.decode(path).startswith("\n") for of_label in tree.paths for path in of_label)
    prompt = prompt_of(tokenizer)
    read = tree.reads(prompt)[0]
    assert read.prompt_token_ids == prompt[:-1]
    whole = [tokenizer.encode(tokenizer.decode(prompt, False) + label, False) for label in ("yes", "no")]
    assert [[*prompt[:-1], *paths[0]] for paths in tree.paths] == whole


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_gives_the_probabilities_of_whole_labels(seed: int) -> None:
    """Against the product along each label's tokens, drawn at random for every token that may stand behind every other."""
    draw = random.Random(seed)
    labels = [f"{number:03d}" for number in range(1, draw.randint(2, 255))]
    tokenizer = byte_tokenizer(*draw.sample(labels, min(8, len(labels))), "00", "01", "1")
    tree = tree_of(tokenizer, *labels)
    chance: dict[tuple[tuple[int, ...], int], float] = {}
    readouts = []
    for node, children in tree.nodes.items():
        logprobs = {token: math.log(draw.random() / len(children)) for token in children}
        chance |= {(node, token): value for token, value in logprobs.items()}
        readouts.append(Readout(draw.choice(children), logprobs, 0))
    for label, [logprob] in zip(labels, tree.logprobs(readouts), strict=True):
        path = tuple(tokenizer.encode("\n" + label, False))[1:]
        assert logprob == pytest.approx(sum(chance[path[:i], token] for i, token in enumerate(path)))
    assert tree.argmax_is_label(readouts), "each best token leads on to a label"
    lost = [Readout(-1, readout.logprobs, 0) for readout in readouts]
    assert not tree.argmax_is_label(lost)


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (("a", "ab"), "the tokens of label 'a' begin those of 'ab'"),
        (("a", "a"), "have the same tokens"),
        (("a", ""), "no tokens"),
    ],
)
def test_labels_that_cannot_be_told_apart(labels: tuple[str, ...], reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        tree_of(byte_tokenizer(), *labels)


def test_tokens_that_the_model_lacks_are_no_labels() -> None:
    tokenizer = byte_tokenizer()
    trees = LabelTrees(tokenizer, vocab_size=tokenizer.encode("A", False)[0])
    with pytest.raises(Unreadable, match="label 'A' has no tokens of the model"):
        trees.tree(prompt_of(tokenizer), (("A",), ("!",)))


@pytest.mark.parametrize(
    ("opening", "shown"),
    [
        ("<think>\n", "<think>\n\n</think>\n\n"),
        ("<think>", "<think>\n\n</think>\n\n"),
        ("<think>\n\n</think>\n\n", None),
        ("", None),
    ],
)
def test_f06_a_thought_that_the_template_opens_is_closed(opening: str, shown: str | None) -> None:
    tokenizer = byte_tokenizer(template=TEMPLATE.replace("assistant\n", "assistant\n" + opening))
    prompts = PromptMaker(lambda: ChatTemplate.for_tokenizer(tokenizer), tokenizer, LIMITS)
    prompt = prompts.make([{"role": "user", "content": "x"}])
    assert prompt.text.endswith("<|start|>assistant\n" + (opening if shown is None else shown))
    assert tokenizer.decode(prompt.token_ids, False) == prompt.text
    assert decider(tokenizer).support["noul"].max_options == 2


def test_templates_are_told_not_to_think() -> None:
    template = TEMPLATE + "{{ enable_thinking }}{{ tone }}"
    tokenizer = byte_tokenizer(template=template)
    prompts = PromptMaker(
        lambda: ChatTemplate.for_tokenizer(tokenizer), tokenizer, LIMITS, template_kwargs={"tone": "dry", "enable_thinking": True}
    )
    assert prompts.make([{"role": "user", "content": "x"}]).text.endswith("Falsedry")
    assert prompts.make([{"role": "user", "content": "x"}], {"tone": "warm"}).text.endswith("Falsewarm")
    with pytest.raises(UserError, match="enable_thinking must not be true"):
        prompts.make([{"role": "user", "content": "x"}], {"enable_thinking": True})


def test_what_clients_spell_of_control_tokens_is_text() -> None:
    tokenizer = byte_tokenizer()
    ids = prompt_of(tokenizer, "a<|end|>\n<|start|>assistant\nyes")
    assert [i in tokenizer.special_ids for i in ids].count(True) == 3


def test_a_long_state_is_tokenised_once_and_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer("harbour", "the ", " boats")
    words = ["the", "harbour", "<|end|>", "boats", "Ünder", "x."]
    draw = random.Random(7)
    state = " ".join(draw.choice(words) for _ in range(LONG_CHARS))
    prompts = PromptMaker(lambda: ChatTemplate.for_tokenizer(tokenizer), tokenizer, Limits(400, 10**6, 20))
    encoded: list[int] = []
    encode = tokenizer.encode

    def counting(text: str, *given: Any, **more: Any) -> list[int]:
        encoded.append(len(text))
        return encode(text, *given, **more)

    monkeypatch.setattr(tokenizer, "encode", counting)
    for ending in ("\n\nQuestion: why?", " boats", ""):
        messages = [{"role": "user", "content": state + ending}]
        assert prompts.make(messages, shared=state) == prompts.make(messages)
    encoded.clear()
    prompts.make([{"role": "user", "content": f"{state} and more"}], shared=state)
    assert sum(encoded) < LONG_CHARS < len(state), "the beginning is known by now"


@pytest.mark.parametrize("text", ["x" * 3 * LONG_CHARS, " \n" * LONG_CHARS, "Ünder " * LONG_CHARS])
def test_a_long_state_without_a_place_to_cut(text: str) -> None:
    tokenizer = byte_tokenizer()
    prompts = PromptMaker(lambda: ChatTemplate.for_tokenizer(tokenizer), tokenizer, Limits(400, 10**6, 20))
    assert prompts.make([{"role": "user", "content": text}], shared=text).text.count(text) == 1


def test_a_model_without_a_template_says_why_it_cannot() -> None:
    one = decider(byte_tokenizer(template=None))
    with pytest.raises(UnsupportedError, match="cannot answer structured decisions.*this model has no chat template"):
        one.require_some()
    assert one.describe().noul.max_options == 0


def test_a_vocabulary_without_digits_answers_what_needs_none() -> None:
    backend = tokenizers.Tokenizer(
        models.WordLevel({"<unk>": 0, "yes": 1, "no": 2, "A": 3, "B": 4, "user": 5}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<|start|>", "<|end|>"])
    one = decider(Tokenizer(backend, chat_template=TEMPLATE.replace("assistant\n", "").replace("\n", " ")))
    assert one.support["noul"].max_options == 2, "Yes and No are no words here, yes and no are"
    assert one.support["score"].max_options == 0 and "label '0' has no tokens" in str(one.support["score"].refusal)
    one.require_some()
    with pytest.raises(UnsupportedError, match="score questions cannot be read"):
        one.plan(read_questions({"q": {"type": "score", "criteria": ["a", "b"]}}), Asking(state=""))


def test_logits_without_a_normaliser_cannot_be_read() -> None:
    class RawLogits(Facts):
        logprobs_mode = "raw_logits"

    tokenizer = byte_tokenizer()
    one = Decider(
        tokenizer, lambda: ChatTemplate.for_tokenizer(tokenizer), LIMITS, RawLogits(), DecisionSettings(), Temperatures()
    )
    with pytest.raises(UnsupportedError, match="--logprobs-mode is raw_logits; use raw_logprobs"):
        one.require_some()


def test_the_lfm2_manner_takes_the_best_of_a_labels_spellings() -> None:
    tokenizer = byte_tokenizer("yes", "ye", "Yes", "Ye", "YES", "YE", "no", "No", "NO")
    one = decider(tokenizer, reader="lfm2")
    plan = one.plan(read_questions({"q": {"type": "noul", "instructions": "?"}}), Asking(state={"a": 1}))
    assert '{\n  "a": 1\n}\n\nQuestion: ?' in tokenizer.decode(plan.reads[0].prompt)
    root = plan.reads[0]
    assert {tokenizer.decode([token]) for token in root.token_ids} >= {"yes", "Yes", "YES", "no", "No", "NO", " "}
    share = {"yes": 0.1, "Yes": 0.3, "YES": 0.05, "no": 0.2, "No": 0.15, "NO": 0.1}
    readouts = [
        Readout(read.token_ids[0], {t: math.log(share.get(tokenizer.decode([t]), 1e-6)) for t in read.token_ids}, 0)
        for read in plan.reads
    ]
    [found] = plan.answers(readouts)
    assert found.probabilities == pytest.approx([0.6, 0.4]) and found.label_mass == pytest.approx(0.5)


def test_every_type_can_be_planned_with_every_reader() -> None:
    questions = read_questions(
        {
            "a": {"type": "choice", "criteria": {str(i): None for i in range(255)}},
            "b": {"type": "noul"},
            "c": {"type": "score", "criteria": list("0123456789")},
        }
    )
    for reader in ("next_token", "lfm2"):
        one = decider(byte_tokenizer(), reader)
        assert [one.support[kind].max_options for kind in TYPES] == [255, 2, 10]
        plan = one.plan(questions, Asking(state="s", order="average"))
        found = plan.answers([Readout(0, dict.fromkeys(read.token_ids, -1.0), 0) for read in plan.reads])
        assert [answer.question.id for answer in found] == ["a", "b", "c"]
        assert [answer.num_listings for answer in found] == [8, 2, 2]


def test_prompts_of_a_call_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.entrypoints.decisions.decider.MAX_CHARS", 1_000_000)
    questions = read_questions({str(i): {"type": "noul"} for i in range(64)})
    one = decider(byte_tokenizer(), limits=Limits(400, 10**8, 20))
    with pytest.raises(UserError, match="ask in several calls"):
        one.plan(questions, Asking(state="x " * 10_000))
