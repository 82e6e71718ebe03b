"""GSM8K: word problems from a file of the public form, a few of them shown solved, the others asked.

A line is `{"question": ..., "answer": "reasoning #### 42"}`. An answer is right when its number equals the file's. Called by
`evaluate`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints.kv_eval.questions import Question
from halfbyte.errors import UserError

_MAX_ANSWER_TOKENS = 256
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Problem:
    """One line of the file."""

    question: str
    answer: str


def make_questions(tokenizer: Tokenizer, path: Path, num_questions: int, num_shots: int) -> list[Question]:
    """The first `num_shots` problems are shown, the next `num_questions` (or as many as there are) asked."""
    problems = read_problems(path)
    asked = problems[num_shots : num_shots + num_questions]
    if not asked:
        raise UserError(f"--gsm8k: {path} has {len(problems)} problems, of which {num_shots} are shown and none is left to ask")
    shown = "".join(f"Question: {problem.question}\nAnswer: {problem.answer}\n\n" for problem in problems[:num_shots])
    return [_question(tokenizer, shown, problem) for problem in asked]


def read_problems(path: Path) -> list[Problem]:
    """The lines of the file. UserError names the first that is not of the form."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"--gsm8k: cannot read {path}: {reason}", param="gsm8k") from None
    return [_problem(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]


def final_number(text: str) -> float | None:
    """The number after `####`, or else the last one; None when there is none."""
    _, mark, end = text.partition("####")
    found = _NUMBER.findall(end if mark else text)
    return float(found[0 if mark else -1].replace(",", "")) if found else None


def _problem(line: str, where: str) -> Problem:
    try:
        fields = json.loads(line)
        problem = Problem(fields["question"], fields["answer"])
    except (json.JSONDecodeError, KeyError, TypeError):
        raise UserError(f'--gsm8k: {where} is not {{"question": ..., "answer": ...}}', param="gsm8k") from None
    if not isinstance(problem.question, str) or not isinstance(problem.answer, str) or final_number(problem.answer) is None:
        raise UserError(f"--gsm8k: {where} needs texts, and a number at the end of the answer", param="gsm8k")
    return problem


def _question(tokenizer: Tokenizer, shown: str, problem: Problem) -> Question:
    wanted = final_number(problem.answer)
    return Question(
        kind="gsm8k",
        prompt_token_ids=tokenizer.encode(f"{shown}Question: {problem.question}\nAnswer:"),
        max_tokens=_MAX_ANSWER_TOKENS,
        is_right=lambda text: final_number(text) == wanted,
        stop=("\nQuestion:",),
    )
