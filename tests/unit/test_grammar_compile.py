"""From what is asked to matchers: regular expressions, choices, grammars and tags; limits, errors, and what is kept."""

from __future__ import annotations

import json
import re
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from halfbyte.engine.grammar import compile as grammar_compile
from halfbyte.engine.grammar.compile import GrammarCompiler, GrammarOptions, lark_of
from halfbyte.engine.grammar.source_regex import RegexError, translate
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.errors import UserError
from halfbyte.types import StructuredOutputsParams

WIDTH = 320


@cache
def tokenizer(without: str = "") -> Tokenizer:
    """Byte-level, a token per byte, with an end of text and a control token that are special. without: bytes that have none."""
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(without))
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>", "<|call|>"])
    return Tokenizer(backend, eos_token="<end>")


def compiler() -> GrammarCompiler:
    found = tokenizer().eos_token_id
    assert found is not None
    return GrammarCompiler(tokenizer(), WIDTH, [found])


@cache
def shared() -> GrammarCompiler:
    return compiler()


def asked(**fields: Any) -> str:
    return lark_of(StructuredOutputsParams(**fields), GrammarOptions())


def says(lark: str, text: str) -> bool:
    matcher = shared().matcher(lark)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer().encode(text, False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def sayable(lark: str, *texts: str) -> list[str]:
    return [text for text in texts if says(lark, text)]


def refusal(**fields: Any) -> str:
    with pytest.raises(UserError) as caught:
        shared().check(asked(**fields), "structured_outputs")
    assert caught.value.param is not None and caught.value.param.startswith("structured_outputs")
    assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("a|b", ["a", "b"], ["ab", ""]),
        ("^a|b$", ["a", "b"], ["ax", "xb"]),
        ("^(a|b)$", ["a", "b"], ["ab"]),
        ("(^a|b)c$", ["ac", "bc"], ["abc"]),
        ("^$", [""], ["a"]),
        ("a?", ["", "a"], ["aa"]),
        (r"\d{2}/\d{2}", ["01/02"], ["٠١/٠٢", "1/2"]),
        (r"[^\s/]+", ["é🐲"], ["a b", "a/b", "a\u00a0b"]),
        (".", ["a", "é"], ["\n", "\u2028", "ab"]),
        (r"\u00e9\x41\cJ", ["éA\n"], ["eA\n"]),
        (r"\ud83d\udc32", ["🐲"], ["x"]),
        (r"[a-c&&b]", ["a", "&"], ["d"]),
        (r"(?<year>\d+)-(?P<month>\d+)", ["1-2"], ["12"]),
        ("a*?b+?", ["b", "aabb"], ["a"]),
        ("{a}", ["{a}"], ["a"]),
    ],
)
def test_a_regular_expression_matches_the_whole_answer(pattern: str, yes: list[str], no: list[str]) -> None:
    assert sayable(asked(regex=pattern), *yes, *no) == yes


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("a^b", "'^' stands behind something"),
        ("a$b", "'$' stands before something"),
        ("(a$|c)b", "'$' stands before something"),
        ("(^a)+", "repeats nothing that can be repeated"),
        ("*a", "repeats nothing"),
        ("a**", "repeats nothing"),
        ("a{2,1}", "counts backwards"),
        ("a{,3}", "'{,' is not supported"),
        ("(a", "a group is not closed"),
        ("a)", "closes nothing"),
        ("[a", "ends in the middle"),
        ("a\\", "ends in the middle"),
        ("[]a]", "'[]' and '[^]'"),
        ("[[:alpha:]]", "'[:...:]' is not supported"),
        ("[z-a]", "leads nowhere"),
        (r"(a)\1", r"'\1' is not supported"),
        (r"\bfoo", "border of words"),
        ("(?!a)b", "no lookaround"),
        ("(?i)a", "no lookaround, flags"),
        (r"\ud83d", "the code of a character"),
        ("(" * 60_000, "the limit is 10000"),
        ("(" * 9_000, "nested more than 50 deep"),
        ("(" * 60 + "a" + ")" * 60, "nested more than 50 deep"),
        ("(a{1,1000}){1,1000}", "symbols when its counted repeats are written out"),
        (".{0,100000}", "symbols when its counted repeats"),
        ("a" * 10_001, "the limit is 10000"),
    ],
)
def test_what_a_regular_expression_cannot_be_is_refused(pattern: str, said: str) -> None:
    assert said in refusal(regex=pattern)


def test_a_pattern_in_json_keeps_its_anchors_and_never_loses_a_character() -> None:
    assert translate("^a|b$", whole=False) == "^a|b$"
    lark = asked(json={"type": "string", "pattern": "^a(\\x01|c)b$"})
    assert sayable(lark, '"acb"', '"ab"') == ['"acb"']
    with pytest.raises(RegexError):
        translate("[", whole=False)


def test_choices_are_said_as_they_are() -> None:
    choices = ["a", "ab", "ab", 'é"\\\n', "🐲 /x/ // y", "(a|b)"]
    assert sayable(asked(choice=choices), *dict.fromkeys(choices), "b", "") == list(dict.fromkeys(choices))


def test_json_object_is_any_object() -> None:
    assert sayable(asked(json_object=True), "{}", '{"a": [1]}', "[]", "1") == ["{}", '{"a": [1]}']


def test_lark_is_taken_as_it_is() -> None:
    lark = asked(grammar='start: greeting " " NAME // a comment (((\ngreeting: "hi" | "(((("\nNAME: /[a-z\\/]+/ # "more\n')
    assert sayable(lark, "hi bob", "(((( a/b", "hi ") == ["hi bob", "(((( a/b"]


def test_a_schema_inside_a_grammar_is_held_to_the_same_rules() -> None:
    lark = asked(grammar='start: "<" body ">"\nbody: %json {"properties": {"a": {"type": "integer"}}, "required": ["a"]}\n')
    assert sayable(lark, '<{"a": 1}>', '<{"a":"x"}>', '<{"\\u0061":1}>') == ['<{"a": 1}>']
    assert "x-guidance is not supported" in refusal(grammar='start: %json {"x-guidance": {"lenient": true}}')
    assert "#/type: must be one or several of" in refusal(grammar='start: %json  {"type": "str"}')
    assert "there is no JSON" in refusal(grammar="start: %json {")


def test_ebnf_becomes_lark() -> None:
    lark = asked(grammar='root ::= "yes" | n # say\nn ::= [0-9]+ ("\\u00e9" | "\\x41")\n')
    assert sayable(lark, "yes", "12é", "1A", "12") == ["yes", "12é", "1A"]


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("start: " + "(" * 60_000, "nests brackets more than 20 deep"),
        ("root ::= " + "(" * 60_000, "nests brackets more than 20 deep"),
        ("start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(1_001)), "more than 1000 rules"),
        ('start: "a" ' * 10_000, "the limit is 65536"),
        ("start: b", 'unknown name: "b"'),
        ("root ::= (", "cannot be read as EBNF"),
        ('x ::= "a"', "No 'root' rule"),
        ("start: start", "no answer satisfies it"),
        ('start[temperature=0.5]: "a"', "the option temperature"),
        ("start: /(/", "unclosed group"),
    ],
)
def test_what_a_grammar_cannot_be_is_refused(grammar: str, said: str) -> None:
    assert said in refusal(grammar=grammar)


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
CALL_A = {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
CALL_B = {"type": "tag", "begin": "<f=b>", "content": {"type": "any_text"}, "end": "</f>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL_A, CALL_B]}
TEXTS = [
    "",
    "hi",
    '<f=a>{"x":1}</f>',
    'hi <f=a>{"x":1}</f> and <f=b>< f </f>.',
    "hi <f=b></f>",
    "<f=c>",
    '<f=a>{"x":"s"}</f>',
    "<f=b>",
]


def tags(form: dict[str, Any]) -> str:
    return asked(structural_tag=json.dumps({"type": "structural_tag", "format": form}))


def test_tags_in_a_text_follow_their_triggers() -> None:
    assert sayable(tags(TRIGGERED), *TEXTS) == TEXTS[:5]
    assert sayable(tags(TRIGGERED | {"at_least_one": True}), *TEXTS) == [TEXTS[2]]
    assert sayable(tags(TRIGGERED | {"stop_after_first": True}), *TEXTS) == [*TEXTS[:3], TEXTS[4]]
    assert sayable(tags(TRIGGERED | {"stop_after_first": True, "at_least_one": True}), *TEXTS) == [TEXTS[2]]


def test_the_earlier_form_of_tags_means_the_same() -> None:
    old = {"type": "structural_tag", "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="]}
    assert sayable(asked(structural_tag=json.dumps(old)), *TEXTS) == TEXTS[:3]


def test_formats_can_be_put_together() -> None:
    thought = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}
    lark = tags({"type": "sequence", "elements": [thought, {"type": "json_schema", "json_schema": SCHEMA}]})
    assert sayable(lark, '<t>a < b</t>{"x":1}', '<t></t>{"x": 2}', '{"x":1}') == ['<t>a < b</t>{"x":1}', '<t></t>{"x": 2}']
    either = tags({"type": "or", "elements": [{"type": "const_string", "value": "a"}, {"type": "regex", "pattern": "^[bc]$"}]})
    assert sayable(either, "a", "b", "d", "ab") == ["a", "b"]
    listed = {
        "type": "tags_with_separator",
        "tags": [{**CALL_A, "content": {"type": "const_string", "value": "1"}}],
        "separator": ",",
    }
    assert sayable(tags(listed), "", "<f=a>1</f>", "<f=a>1</f>,<f=a>1</f>", ",") == ["", "<f=a>1</f>", "<f=a>1</f>,<f=a>1</f>"]
    assert sayable(
        tags(listed | {"at_least_one": True, "stop_after_first": True}), "", "<f=a>1</f>,<f=a>1</f>", "<f=a>1</f>"
    ) == ["<f=a>1</f>"]
    assert sayable(tags({"type": "any_text"}), "", "x\ny") == ["", "x\ny"]


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"type": "qwen_xml_parameter"}, "format of type 'qwen_xml_parameter'; supported are const_string"),
        (
            {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "json_schema", "json_schema": {}}]},
            "where it ends cannot be told",
        ),
        ({"type": "sequence", "elements": [TRIGGERED, {"type": "regex", "pattern": "a"}]}, "where it ends cannot be told"),
        ({"type": "or", "elements": [{"type": "any_text"}]}, "has any_text or triggered_tags before"),
        ({"type": "tag", "begin": "a"}, "no object with a type"),
        ({**TRIGGERED, "triggers": ["<g"]}, "none of its triggers"),
        ({**TRIGGERED, "triggers": []}, "needs triggers"),
        ({"type": "any_text", "excludes": ["x"]}, "excludes"),
        ({"type": "json_schema", "json_schema": {"type": "str"}}, "#/type: must be one or several of"),
        ({"type": "regex", "pattern": "("}, "a group is not closed"),
        ({"type": "const_string", "value": 1}, "needs value, a text"),
    ],
)
def test_formats_that_are_not_supported_are_named(form: dict[str, Any], said: str) -> None:
    assert said in refusal(structural_tag=json.dumps({"type": "structural_tag", "format": form}))


@pytest.mark.parametrize("text", ["[", "1", "{}", '{"structures": [1], "triggers": ["a"]}', '{"format":' * 5_000])
def test_tags_that_are_none_are_refused(text: str) -> None:
    assert "structural_tag" in refusal(structural_tag=text)


def test_too_many_tags_are_refused() -> None:
    many = {**TRIGGERED, "tags": [{**CALL_A, "begin": f"<f={i}>"} for i in range(2_000)]}
    assert "more than 1000 rules" in refusal(structural_tag=json.dumps({"format": many}))


def test_formats_nested_too_deep_are_refused() -> None:
    form: dict[str, Any] = {"type": "any_text"}
    for _ in range(25):
        form = {"type": "sequence", "elements": [form]}
    assert "nested more than 20 deep" in refusal(structural_tag=json.dumps({"format": form}))


def test_defaults_of_the_server_are_added_to() -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    open_, spaced = StructuredOutputsParams(json=schema), '{"a": 1}'
    assert says(lark_of(open_, GrammarOptions()), spaced)
    assert not says(lark_of(open_, GrammarOptions(disable_any_whitespace=True)), spaced)
    assert not says(lark_of(StructuredOutputsParams(json=schema, disable_any_whitespace=True), GrammarOptions()), spaced)
    assert not says(lark_of(open_, GrammarOptions(disable_additional_properties=True)), '{"b":1}')
    assert "not both" in refusal(json=schema, disable_any_whitespace=True, whitespace_pattern=" ")
    wider = StructuredOutputsParams(json=schema, whitespace_pattern="[ ]{0,9}")
    assert says(lark_of(wider, GrammarOptions(whitespace_pattern=" ?")), '{    "a":1}')


def test_errors_name_the_field_that_the_caller_says() -> None:
    with pytest.raises(UserError) as caught:
        lark_of(StructuredOutputsParams(json={"type": "str"}), GrammarOptions(), param="response_format")
    assert caught.value.param == "response_format" and str(caught.value).startswith("response_format cannot be used: #/type")


def test_an_answer_ends_where_it_may_and_special_tokens_are_no_text() -> None:
    vocabulary = tokenizer()
    matcher = shared().matcher(asked(regex="[^x]{1,2}"))
    end, call = vocabulary.eos_token_id, vocabulary.token_id("<|call|>")
    assert end is not None and call is not None

    def allowed() -> set[int]:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        return {int(token) for token in np.flatnonzero(bits)}

    assert not {end, call} & allowed() and max(allowed()) < vocabulary.vocab_size
    assert matcher.consume_tokens(vocabulary.encode("a", False))
    assert end in allowed() and call not in allowed()
    assert shared().matcher('start: <|call|> "a"').consume_token(call)


def test_all_ends_of_a_model_end_an_answer() -> None:
    first, second = (tokenizer().token_id(text) for text in ("<end>", "<|call|>"))
    assert first is not None and second is not None
    for end in (first, second):
        matcher = GrammarCompiler(tokenizer(), WIDTH, [first, second]).matcher('start: "a"')
        assert matcher.consume_tokens(tokenizer().encode("a", False)) and matcher.consume_token(end)


def test_matchers_of_one_grammar_do_not_know_of_each_other() -> None:
    made = compiler()
    lark = asked(regex="ab|cd")
    one, other = made.matcher(lark), made.matcher(lark)
    a, b, c = tokenizer().encode("abc", False)
    assert one.consume_token(a) and other.consume_token(c)
    assert one.consume_token(b) and one.is_accepting() and not other.is_accepting()
    assert not made.matcher(lark).is_accepting()


def test_matchers_are_made_in_several_threads() -> None:
    made, said = compiler(), []
    grammars = [asked(regex=f"a{{{1 + i % 4}}}b") for i in range(64)]

    def work(lark: str, times: int) -> None:
        matcher = made.matcher(lark)
        said.append(matcher.consume_tokens(tokenizer().encode("a" * times + "b", False)) and matcher.is_accepting())

    threads = [threading.Thread(target=work, args=(lark, 1 + i % 4)) for i, lark in enumerate(grammars)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == [True] * 64


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiler()
    compiled: list[str] = []
    real = llguidance.LLMatcher

    class Counting:
        @staticmethod
        def grammar_from_lark(lark: str) -> str:
            compiled.append(lark)
            return real.grammar_from_lark(lark)

        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            return real(*arguments, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", Counting)
    monkeypatch.setattr(grammar_compile, "MAX_KEPT", 2)
    first, second, third = (asked(regex=f"a{{{i}}}") for i in (1, 2, 3))
    for lark in (first, second, first, third, first, second):
        made.matcher(lark)
    assert compiled == [first, second, third, second], "the one that was used least recently went"
    monkeypatch.setattr(grammar_compile, "MAX_KEPT_CHARS", len(first) - 1)
    made.matcher(third)
    made.matcher(third)
    assert compiled[4:] == [third, third], "what is too long is not kept"


def test_a_refused_grammar_is_not_kept_and_says_so_again() -> None:
    made = compiler()
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            made.check('start: "secret" missing', "structured_outputs.grammar")
        assert str(caught.value) == 'structured_outputs.grammar cannot be used: unknown name: "missing"'
        assert made.matcher('start: "secret" missing').is_error()


def test_a_space_that_a_tokenizer_puts_before_texts_is_not_part_of_them() -> None:
    vocabulary = {
        "<unk>": 0,
        "<s>": 1,
        **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)},
        "\u2581": 258,
        "a": 259,
        "\u2581a": 260,
    }
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    spaced = Tokenizer(backend, eos_token="<s>")
    library = GrammarCompiler(spaced, 261, [1]).library_tokenizer
    assert spaced.encode("a", False) == [260] and library.tokenize_str("a") == [259]


def test_the_examples_of_the_page_are_taken() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/structured_outputs.md").read_text(encoding="utf-8")
    bodies = [json.loads(body) for body in re.findall(r"-d '(\{.*?\n\})'", page, re.DOTALL)]
    for body in bodies:
        form = body.get("response_format", {})
        if form.get("type") == "json_schema":
            fields = {"json": form["json_schema"]["schema"]}
        elif form.get("type") == "structural_tag":
            fields = {"structural_tag": json.dumps(form)}
        else:
            fields = {"json_object": True} if form else body["structured_outputs"]
        shared().check(asked(**fields), "structured_outputs")
    assert len(bodies) == 7


ADVERSARIAL: dict[str, dict[str, Any]] = {
    "nested repeats": {"regex": "((a+)+)+b"},
    "counted repeats": {"regex": "(a{1,100}){1,100}"},
    "a long lookahead": {"regex": "(a|b)*a(a|b){5000}"},
    "classes of Unicode": {"regex": r"[\p{L}\p{N}]{1,5000}[^\p{Lu}]{1,5000}"},
    "any text, often": {"regex": "(.*[ab]){3000}"},
    "ten thousand choices": {"choice": [f"choice {i}" for i in range(10_000)]},
    "a thousand members": {"json": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1_000)}}},
    "nine thousand members": {
        "json": {"properties": {f"q{j}": {"properties": {f"p{i}": {"type": "integer"} for i in range(999)}} for j in range(9)}}
    },
    "a large enum": {"json": {"enum": [f"value {i}" for i in range(30_000)]}},
    "a long text": {"json": {"type": "string", "minLength": 100_000, "maxLength": 1_000_000}},
    "a long array": {"json": {"type": "array", "minItems": 1_000, "maxItems": 1_000_000}},
    "a pattern with a length": {
        "json": {"type": "string", "pattern": r"^([\w.]+[._-]?)+@(\w+[.-]?)+$", "minLength": 6, "maxLength": 5000}
    },
    "many options": {
        "json": {"oneOf": [{"properties": {"k": {"const": i}}, "required": ["k"], "type": "object"} for i in range(100)]}
    },
    "alternatives of alternatives": {
        "json": {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(4)]} for i in range(12)]}
    },
    "a grammar of doublings": {"grammar": "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40: "a"'},
    "ambiguity": {"grammar": 'start: start start | "a" | start "a" | ""'},
    "a large enum of one character more": {"json": {"enum": [f"{i}" for i in range(100_000)]}},
}


def test_a_text_that_the_vocabulary_cannot_write_is_refused_where_each_answer_begins_with_it() -> None:
    few = tokenizer(without="\xf1")
    assert few.eos_token_id is not None
    checker = GrammarCompiler(few, WIDTH, [few.eos_token_id])
    with pytest.raises(UserError, match="regex cannot be used: this model has no tokens for its text"):
        checker.check(asked(regex="so \U00065b2ft6+"), "regex")
    checker.check(asked(regex="so|\U00065b2ft6+"), "regex")
    checker.check('start: <|call|> "so"', "grammar")


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_what_is_meant_to_take_long_is_quick_or_refused(name: str) -> None:
    began = time.process_time()
    try:
        lark = asked(**ADVERSARIAL[name])
        shared().check(lark, "structured_outputs")
    except UserError:
        pass
    else:
        matcher = shared().matcher(lark)
        for _ in range(10):
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            tokens = np.flatnonzero(bits)
            if not len(tokens) or not matcher.consume_token(int(tokens[len(tokens) // 2])):
                break
    assert time.process_time() - began < 5
