"""Which response templates are taken, what is read out of them, and how the others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfbyte.engine.tokenizer import tokenizer_from_folder
from halfbyte.entrypoints.tool_parsers.response_template import CallShape, load_response_template
from halfbyte.errors import UserError
from tests.unit.tool_parsers.test_hf import JSON_CALLS, LIST_CALLS, NAMED, OPEN_END, TAG_CALLS, with_calls
from tests.unit.tool_parsers.token_marks import tokenizer_with


def template(**changes: Any) -> dict[str, Any]:
    return {"start_anchor": "<a>", "fields": {"content": {}}, **changes}


def with_field(name: str, **field: Any) -> dict[str, Any]:
    return template(fields={name: field})


REFUSED: list[tuple[Any, str]] = [
    (None, "has none"),
    ([], "it must be an object"),
    (template(version=2), "version 2"),
    (template(other=1), "it cannot have other"),
    (template(defaults={"content": ""}), "defaults"),
    (template(fields={}), "fields must be an object, and not empty"),
    (template(fields={"images": {"open": "x"}}), "fields cannot have images"),
    ({"fields": {"content": {}}}, "start_anchor"),
    (template(start_anchor_pattern="x"), "both start_anchor and start_anchor_pattern"),
    (template(start_anchor=""), "start_anchor must be a text"),
    (template(start_anchor=[]), "start_anchor must be a text"),
    (template(fields={"content": {}, "thinking": {}}), "only one field can be without an opener"),
    (template(fields={"tool_calls": {"content": "json"}}), "tool_calls needs open"),
    (with_field("content", opens="x"), "fields.content cannot have opens"),
    (with_field("content", open="x", open_pattern="x"), "both open and open_pattern"),
    (with_field("content", close=["x", ""]), "fields.content.close must be a text"),
    (with_field("content", close_pattern="("), "fields.content.close_pattern is no regular expression"),
    (with_field("content", open_pattern="x*"), "matches where there is nothing"),
    (with_field("content", content="json"), "fields.content.content must be text"),
    (with_field("content", content="yaml"), "fields.content.content must be one of"),
    (with_field("content", content_args={"trim": True}), "fields.content.content_args cannot have trim"),
    (with_field("content", repeats=True, join=" "), "join"),
    (with_field("content", repeats=1), "repeats must be true or false"),
    (with_field("content", transform="{content}"), "transform"),
    (with_field("thinking", open_pattern="<(?P<kind>x)>"), "the groups kind"),
    (with_calls(transform_each=True), "transform_each needs a transform"),
    (with_calls(transform={"name": "f_{content}"}), "mixes a placeholder with text"),
    (with_calls(transform={"name": "{fn}"}), "{fn} is not defined"),
    (with_calls(content="xml-inline", transform=NAMED), "tag_pattern must be a regular expression"),
    (with_calls(content="xml-inline", content_args={"tag_pattern": "<(?P<key>x)>"}), "needs the groups key and value"),
    (with_calls(content="json", content_args={"string_delims": [["a"]]}), "string_delims"),
    (with_calls(content="kv-lines", content_args={"line_sep": ""}), "line_sep must be a text"),
    (with_calls(content="kv-lines", content_args={"value_parser": {"name": "x"}}), "value_parser"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_wrong_with_a_template_is_said(given: Any, words: str) -> None:
    with pytest.raises(UserError) as refused:
        load_response_template(given)
    assert words in str(refused.value) and refused.value.param == "response_template"


def test_where_name_and_arguments_are_is_read_out_of_the_transform() -> None:
    def shape(given: dict[str, Any]) -> CallShape | None:
        return load_response_template(given).regions["tool_calls"].call_shape

    assert shape(JSON_CALLS) == CallShape(None, ("name",), ("args",))
    assert shape(TAG_CALLS) == CallShape("fn", (), ())
    assert shape(LIST_CALLS) == CallShape(None, ("name",), ("arguments",))
    assert shape(OPEN_END) == CallShape(None, ("name",), ("arguments",))
    assert shape(with_calls(content="json")) == CallShape(None, ("function", "name"), ("function", "arguments"))
    assert shape(with_calls(content="json", transform={"function": {"name": "{content.name}", "arguments": "{content}"}})) is None
    assert shape(with_calls(content="json", transform={"function": {"name": "f", "arguments": "{content}"}})) is None


def test_the_prefix_is_what_stands_behind_the_last_anchor() -> None:
    loaded = load_response_template(TAG_CALLS)
    assert loaded.prefix_of("<|bot|>\nold<|user|>x<|bot|>\n[[plan]]") == "[[plan]]"
    assert loaded.prefix_of("<|bot|>\nold<|tool_result_end|>") == ""
    assert loaded.prefix_of("no anchor") == "no anchor"
    assert load_response_template(template(start_anchor=None, start_anchor_pattern=r"<a\d>")).prefix_of("<a1>x<a2>y") == "y"


def test_a_template_without_content_gets_it() -> None:
    loaded = load_response_template(with_field("thinking", open="<t>", close="</t>"))
    assert loaded.outside is not None and loaded.outside.name == "content"
    explicit = load_response_template(template(fields={"content": {"open": "<c>"}, "thinking": {"open": "<t>"}}))
    assert explicit.outside is None


@pytest.mark.parametrize("config", [{"response_template": JSON_CALLS}, {}])
def test_the_tokenizer_has_the_template_of_its_configuration(config: dict[str, Any], tmp_path: Path) -> None:
    tokenizer_with()._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenizer_from_folder(tmp_path).response_template == config.get("response_template")
