"""`halfbyte kv-eval`, its parts: statistics, windows of text, and the questions with what counts as an answer. No model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints.kv_eval import gsm8k, retrieval, structured
from halfbyte.entrypoints.kv_eval.metrics import Share, TextResult, WindowScores, bootstrap_interval
from halfbyte.entrypoints.kv_eval.questions import Question, ask
from halfbyte.entrypoints.kv_eval.windows import cut_windows, read_text
from halfbyte.errors import UserError
from halfbyte.model_runner.texts import calibration_files, sample_files

BOS = 1


class WordTokenizer:
    """One id per word or line end, after a BOS; ids stay those of the first text that had the word."""

    chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    tool_template: str | None = None
    bos_token = eos_token = None

    def __init__(self) -> None:
        self.words: list[str] = ["", "<bos>"]

    def encode(self, text: str, add_special_tokens: bool = True, *, seams: bool = False) -> list[int]:
        ids = [BOS] if add_special_tokens else []
        for word in re.findall(r"\S+|\n", text):
            if word not in self.words:
                self.words.append(word)
            ids.append(self.words.index(word))
        return ids

    def quote_special(self, text: str) -> str:
        return text

    def text(self, ids: list[int]) -> str:
        return " ".join(self.words[i] for i in ids)


@pytest.fixture
def words() -> WordTokenizer:
    return WordTokenizer()


def as_tokenizer(words: WordTokenizer) -> Tokenizer:
    return cast(Tokenizer, words)


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [(10, 10, 0.7225, 1.0), (0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (90, 100, 0.8256, 0.9448)],
)
def test_wilson_intervals(right: int, asked: int, low: float, high: float) -> None:
    share = Share(right, asked)
    assert share.rate == right / asked
    assert share.interval == pytest.approx((low, high), abs=5e-5)


def test_share_of_answers() -> None:
    assert Share.of([True, False, True]) == Share(2, 3)


def test_bootstrap_of_a_constant_is_the_constant() -> None:
    assert bootstrap_interval([np.full(100, 0.25), np.full(7, 0.25)], seed=0) == (0.25, 0.25)


def test_bootstrap_holds_the_mean_and_repeats_itself() -> None:
    values = np.random.default_rng(1).exponential(size=3200)
    low, high = bootstrap_interval([values], seed=5)
    assert low < values.mean() < high
    assert (low, high) == bootstrap_interval([values], seed=5) != bootstrap_interval([values], seed=6)
    # the standard error of 3200 independent values with deviation 1 is 0.0177
    assert high - low == pytest.approx(2 * 1.96 * 0.0177, rel=0.2)


def test_bootstrap_knows_that_neighbours_err_together() -> None:
    independent = np.random.default_rng(2).exponential(size=3200)
    together = np.repeat(independent[:100], 32)
    low, high = bootstrap_interval([independent], seed=0)
    low_together, high_together = bootstrap_interval([together], seed=0)
    assert high_together - low_together > 3 * (high - low)


def test_text_result() -> None:
    first = WindowScores(np.array([0.0, 0.2]), np.log([2.0, 2.0]), np.log([4.0, 4.0]), np.array([True, True]))
    second = WindowScores(np.array([0.4, 0.2]), np.log([8.0, 8.0]), np.log([4.0, 4.0]), np.array([False, True]))
    result = TextResult.of([first, second], seed=0)
    assert (result.num_tokens, result.top1) == (4, 0.75)
    assert (result.kl, result.kl_p99) == pytest.approx((0.2, 0.394))
    assert (result.base_perplexity, result.perplexity) == pytest.approx((4.0, 4.0))
    assert (result.kl_low, result.kl_high) == pytest.approx((0.1, 0.3)), "there are two blocks to draw from"


def test_windows_are_the_end_of_a_text_after_special_tokens(tmp_path: Path, words: WordTokenizer) -> None:
    long, short = tmp_path / "long.txt", tmp_path / "short.txt"
    long.write_text("a b c d e f g h")
    short.write_text("x y z")
    windows = cut_windows([long, short], as_tokenizer(words), [6, 4])
    assert [(w.name, w.length, words.text(w.token_ids)) for w in windows] == [
        ("long", 4, "<bos> f g h"),
        ("long", 6, "<bos> d e f g h"),
        ("short", 4, "<bos> x y z"),  # and not a second time for 6, which it does not reach
    ]


def test_windows_of_files_that_cannot_be_used(tmp_path: Path, words: WordTokenizer) -> None:
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in ((empty, "has 1 tokens"), (binary, "not UTF-8"), (tmp_path / "none.txt", "No such file")):
        with pytest.raises(UserError, match=message):
            cut_windows([path], as_tokenizer(words), [4])


def test_shipped_texts_are_apart() -> None:
    samples, calibration = sample_files(), calibration_files()
    assert len(samples) >= 4 and len(calibration) >= 8 and not set(samples) & set(calibration)
    paragraphs = [{p for p in read_text(path).split("\n\n") if len(p) > 40} for path in (*samples, *calibration)]
    assert len(set.union(*paragraphs)) == sum(map(len, paragraphs)), "no paragraph stands in two places"


def test_retrieval_prompts_hold_the_answer_and_have_the_length(words: WordTokenizer) -> None:
    questions = retrieval.make_questions(as_tokenizer(words), [120, 300], 15, seed=0)
    assert [q.kind for q in questions] == ["120"] * 15 + ["300"] * 15
    for question in questions:
        prompt = words.text(question.prompt_token_ids)
        name = re.findall(r"(\w+) ->$", prompt)[0]
        [code] = re.findall(rf"{name} -> (\d{{4}})", prompt)
        assert question.is_right(f" {code}") and not question.is_right(f" {code}1") and not question.is_right("")
        length = int(question.kind)
        assert length - 80 < len(question.prompt_token_ids) <= length


def test_retrieval_asks_for_each_line_once_per_document_and_takes_turns(words: WordTokenizer) -> None:
    questions = retrieval.make_questions(as_tokenizer(words), [300], 20, seed=0)
    prompts = [words.text(q.prompt_token_ids) for q in questions]
    assert len(set(prompts)) == 20
    documents = [prompt.partition("The line of")[0] for prompt in prompts]
    assert documents == documents[:2] * 10 and documents[0] != documents[1]


def test_retrieval_is_deterministic(words: WordTokenizer) -> None:
    def prompts(seed: int) -> list[list[int]]:
        return [q.prompt_token_ids for q in retrieval.make_questions(as_tokenizer(words), [200], 5, seed)]

    assert prompts(3) == prompts(3) != prompts(4)


def test_retrieval_refuses_a_length_without_room(words: WordTokenizer) -> None:
    with pytest.raises(UserError, match="30 tokens holds no line"):
        retrieval.make_questions(as_tokenizer(words), [30], 1, seed=0)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3 + 4 = <<3+4=7>>7 eggs.\n#### 7", 7),
        ("#### 1,234", 1234),
        ("so 5 apples, then 12.50 dollars", 12.5),
        ("it is -3 degrees", -3),
        ("#### nothing", None),
        ("no idea", None),
    ],
)
def test_final_number(text: str, number: float | None) -> None:
    assert gsm8k.final_number(text) == number


def test_gsm8k_shows_the_first_and_asks_the_next(tmp_path: Path, words: WordTokenizer) -> None:
    path = tmp_path / "problems.jsonl"
    problems = [{"question": f"what is {n} and 1", "answer": f"it is {n + 1} #### {n + 1}"} for n in range(5)]
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    questions = gsm8k.make_questions(as_tokenizer(words), path, num_questions=2, num_shots=2)
    assert len(questions) == 2
    prompt = words.text(questions[0].prompt_token_ids)
    assert prompt.endswith("Question: what is 2 and 1 \n Answer:") and "#### 1" in prompt and "#### 3" not in prompt
    assert questions[0].is_right("#### 3") and not questions[0].is_right("#### 2")
    with pytest.raises(UserError, match="none is left to ask"):
        gsm8k.make_questions(as_tokenizer(words), path, num_questions=2, num_shots=5)


@pytest.mark.parametrize(
    "line", ["[]", "{}", "{", '{"question": "a", "answer": "no number"}', '{"question": 1, "answer": "#### 1"}']
)
def test_gsm8k_names_the_line_that_is_wrong(tmp_path: Path, line: str) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"question": "a", "answer": "#### 1"}) + "\n\n" + line + "\n")
    with pytest.raises(UserError, match="problems.jsonl:3 "):
        gsm8k.read_problems(path)


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ('{"name": "A", "age": 3}', True),
        ('Here it is:\n```json\n{"age": null, "name": []}\n```', True),
        ('{"name": "A"}', False),
        ('{"name": "A", "age": 3, "city": "B"}', False),
        ('{"name": "A", "age": 3', False),
        ("{'name': 'A', 'age': 3}", False),
        ("name: A", False),
    ],
)
def test_json_answers(text: str, is_right: bool) -> None:
    assert structured.has_keys(text, ("name", "age")) is is_right


@pytest.mark.parametrize(
    ("body", "is_right"),
    [
        ('{"name": "go", "arguments": {"to": "B"}}', True),
        ('{"name": "stay", "arguments": {"to": "B"}}', False),
        ('{"name": "go", "arguments": {"from": "B"}}', False),
        ('{"name": "go", "arguments": "B"}', False),
        ('{"name": "go"}', False),
        ("[]", False),
        ("go(B)", False),
    ],
)
def test_tool_calls(body: str, is_right: bool) -> None:
    call = f"<tool_call>\n{body}\n</tool_call>"
    assert structured.calls_tool(f"Yes. {call}", "go", ("to",)) is is_right
    assert not structured.calls_tool(body, "go", ("to",)), "the tags are part of the form"
    assert not structured.calls_tool(call + call, "go", ("to",)), "one call was asked for"


def test_format_questions_go_through_the_template(words: WordTokenizer) -> None:
    questions = structured.make_questions(as_tokenizer(words), 12, seed=0)
    assert [q.kind for q in questions] == ["json", "tool call"] * 6
    prompts = [words.text(q.prompt_token_ids) for q in questions]
    assert all(prompt.startswith("user: ") and prompt.endswith(" assistant:") for prompt in prompts)
    assert len(set(prompts)) == 12
    for question, prompt in zip(questions[::2], prompts[::2], strict=True):
        keys = re.findall(r"with the keys (.*?)\.", prompt)[0].split(", ")
        assert question.is_right(json.dumps(dict.fromkeys(keys))) and not question.is_right(json.dumps({}))


def test_format_questions_need_a_template(words: WordTokenizer) -> None:
    words.chat_template = ""
    with pytest.raises(UserError, match="leave format out of --tests"):
        structured.make_questions(as_tokenizer(words), 2, seed=0)


def test_ask_is_greedy_and_judges_each_answer() -> None:
    asked: list[Any] = []

    class Echo:
        def generate(self, prompts: list[list[int]], params: list[Any], use_tqdm: bool) -> list[Any]:
            asked.extend(params)
            return [SimpleNamespace(outputs=[SimpleNamespace(text=str(ids[0]))]) for ids in prompts]

    questions = [
        Question(kind="k", prompt_token_ids=[n], max_tokens=n, is_right=lambda text: text == "2", stop=("x",)) for n in (1, 2)
    ]
    assert ask(cast(Any, Echo()), questions) == [False, True]
    assert [(p.temperature, p.max_tokens, p.stop) for p in asked] == [(0.0, 1, ["x"]), (0.0, 2, ["x"])]
