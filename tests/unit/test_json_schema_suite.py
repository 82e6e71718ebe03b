"""The official JSON Schema test suite, draft 2020-12: what is enforced, what is narrower, what is refused. Nothing may be wrong.

The suite is inside the source archive of the package `jsonschema`. It is fetched from the package index, checked, and kept in the
user's cache. `python tests/unit/test_json_schema_suite.py > docs/results/json_schema_suite.md` writes the page.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import llguidance
import pytest

from halfbyte.engine.grammar.compile import GrammarOptions, lark_of
from halfbyte.errors import UserError
from halfbyte.types import StructuredOutputsParams
from tests.unit.byte_vocabulary import vocabulary

ARCHIVE = "jsonschema-4.26.0.tar.gz"
SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
FOLDER = "json/tests/draft2020-12/"
PAGE = Path(__file__).resolve().parents[2] / "docs/results/json_schema_suite.md"
LIBRARY = "llguidance"
OUTCOMES = ("enforced", "narrower", "refused", "wrong")


@dataclass(frozen=True)
class Outcome:
    """file: below the draft's folder. kind: one of OUTCOMES. why: of a refusal, or the instances at fault."""

    file: str
    description: str
    kind: str
    why: str


def fetch() -> bytes:
    """The archive, from the cache or the index. OSError when neither has it."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    kept = Path(cache_home) / "halfbyte" / "json-schema-suite" / f"{SHA256}.tar.gz"
    if kept.is_file() and hashlib.sha256(data := kept.read_bytes()).hexdigest() == SHA256:
        return data
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    index = os.environ.get("PIP_INDEX_URL") or asked.stdout.strip() or "https://pypi.org/simple"
    page = f"{index.rstrip('/')}/jsonschema/"
    with urllib.request.urlopen(page, timeout=10) as answer:
        found = re.search(rf'href="([^"]*{re.escape(ARCHIVE)}[^"]*)"', answer.read().decode())
    if found is None:
        raise OSError(f"{page} has no {ARCHIVE}")
    with urllib.request.urlopen(urljoin(page, found[1]), timeout=60) as answer:
        data = answer.read()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise OSError(f"{ARCHIVE} of {index} is not the archive that is expected")
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = kept.with_name(f"{kept.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(kept)
    return data


def groups() -> Iterator[tuple[str, dict[str, Any]]]:
    """(file, a schema with its instances)."""
    with tarfile.open(fileobj=io.BytesIO(fetch())) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            name = member.name.partition("/")[2]
            if name.startswith(FOLDER) and name.endswith(".json") and (file := archive.extractfile(member)) is not None:
                yield from ((name.removeprefix(FOLDER).removesuffix(".json"), group) for group in json.load(file))


def arrangements(value: Any) -> Iterator[Any]:
    """A value with its members in other orders, and whole numbers without a fraction: equal values for JSON schemas."""
    if isinstance(value, float) and value.is_integer():
        yield from (value, int(value))
    elif isinstance(value, list):
        yield from (list(each) for each in itertools.islice(itertools.product(*map(arrangements, value)), 24))
    elif isinstance(value, dict):
        for names in itertools.islice(itertools.permutations(value), 24):
            inner = itertools.product(*(arrangements(value[name]) for name in names))
            yield from (dict(zip(names, each, strict=True)) for each in itertools.islice(inner, 24))
    else:
        yield value


def spellings(value: Any) -> Iterator[str]:
    for arranged in arrangements(value):
        for separators, is_ascii in itertools.product(((",", ":"), (", ", ": ")), (False, True)):
            yield json.dumps(arranged, separators=separators, ensure_ascii=is_ascii)


def says(start: llguidance.LLMatcher, text: str) -> bool:
    matcher = start.deep_copy()
    tokens = list(text.encode("utf-8", "surrogatepass"))
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def outcome(file: str, group: dict[str, Any]) -> Outcome:
    try:
        lark = lark_of(StructuredOutputsParams(json=group["schema"]), GrammarOptions(), param="schema")
    except UserError as error:
        return Outcome(file, group["description"], "refused", str(error))
    start = llguidance.LLMatcher(
        vocabulary(),
        llguidance.LLMatcher.grammar_from_lark(lark),
        log_level=0,
        limits=llguidance.LLParserLimits(verbose_errors=False),
    )
    if start.is_error():
        return Outcome(file, group["description"], "refused", start.get_error())
    said = {test["description"]: any(says(start, text) for text in spellings(test["data"])) for test in group["tests"]}
    valid = {test["description"]: test["valid"] for test in group["tests"]}
    loose = [name for name in said if said[name] and not valid[name]]
    missed = [name for name in said if valid[name] and not said[name]]
    kind = "wrong" if loose else "narrower" if missed else "enforced"
    return Outcome(file, group["description"], kind, "; ".join(loose or missed))


@cache
def outcomes() -> list[Outcome]:
    return [outcome(file, group) for file, group in groups()]


def render(found: list[Outcome]) -> str:
    """The page: counts per file, and what is narrower or refused."""
    counts = Counter((each.file, each.kind) for each in found)
    total = Counter(each.kind for each in found)
    rows = [
        f"| {file} | {' | '.join(str(counts[file, kind] or '-') for kind in OUTCOMES)} |"
        for file in dict.fromkeys(each.file for each in found)
    ]
    listed = {
        kind: [f"- {each.file}: {each.description}" for each in found if each.kind == kind] for kind in ("narrower", "refused")
    }
    return "\n".join(
        [
            "# The JSON Schema test suite",
            "",
            "<!-- Written by tests/unit/test_json_schema_suite.py, which also compares this page with a fresh run. -->",
            "",
            f"The official suite for draft 2020-12, all files, as the source of jsonschema {ARCHIVE[11:-7]} holds it, with",
            f"{LIBRARY} {importlib.metadata.version('llguidance')}.",
            "",
            "- **enforced**: every invalid instance is rejected, and every valid one can be said, in some order of members.",
            "- **narrower**: every invalid instance is rejected, and some valid one cannot be said.",
            "- **refused**: the schema is answered with 400.",
            "- **wrong**: an invalid instance can be said.",
            "",
            "Instances are tried as JSON texts, compact and spaced, with and without escapes.",
            "",
            f"| file | {' | '.join(OUTCOMES)} |",
            "|---|---:|---:|---:|---:|",
            *rows,
            f"| all {len(found)} | {' | '.join(str(total[kind]) for kind in OUTCOMES)} |",
            "",
            "## Narrower",
            "",
            "Formats are enforced, which the suite's `format` file takes for narrower. `contains` wants the items that match",
            "first. Where several branches hold at once, members that only one of them knows are not said beside others'.",
            "",
            *listed["narrower"],
            "",
            "## Refused",
            "",
            "Most of these lead to other documents, or no value satisfies them.",
            "",
            *listed["refused"],
            "",
        ]
    )


@pytest.fixture(scope="module")
def found() -> list[Outcome]:
    try:
        return outcomes()
    except OSError as error:
        pytest.skip(f"the suite is neither in the cache nor on a package index: {error}")


def test_the_suite_is_all_there(found: list[Outcome]) -> None:
    assert len(found) == 438 and len({each.file for each in found}) == 80


def test_no_invalid_instance_can_be_said(found: list[Outcome]) -> None:
    assert [each for each in found if each.kind == "wrong"] == []


def test_what_is_refused_says_why(found: list[Outcome]) -> None:
    assert all(each.why for each in found if each.kind == "refused")


def test_the_page_is_of_a_fresh_run(found: list[Outcome]) -> None:
    """But for the version of the library: another one may do as well."""
    page, fresh = (
        [line for line in text.splitlines() if not line.startswith(LIBRARY)] for text in (PAGE.read_text("utf-8"), render(found))
    )
    assert page == fresh


if __name__ == "__main__":
    print(render(outcomes()), end="")
