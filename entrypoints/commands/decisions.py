"""`halfbyte decisions KIND`: commands about structured decisions. There is one kind, `calibrate FILE`.

It reads labelled questions with a model, fits a temperature per type of question, and says what that gains. Knows the flags, the
terminal and files; the arithmetic is `halfbyte.entrypoints.decisions.calibration`'s, what a line may hold is `labelled`'s.
"""

from __future__ import annotations

import json
import logging
import math
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte import __version__
from halfbyte.entrypoints.bench.results import environment, save
from halfbyte.entrypoints.chat_template import read_template
from halfbyte.entrypoints.commands.kinds import choose_kind
from halfbyte.entrypoints.decisions import calibration, plot
from halfbyte.entrypoints.decisions.answers import Answer
from halfbyte.entrypoints.decisions.calibration import Calibration, Estimate, Metrics, Sample, TypeResult
from halfbyte.entrypoints.decisions.labelled import Labelled, read_labelled
from halfbyte.entrypoints.decisions.orders import ORDERS, Order, check_order
from halfbyte.entrypoints.decisions.questions import TYPES, QuestionType
from halfbyte.entrypoints.decisions.readers import READERS
from halfbyte.entrypoints.decisions.settings import AUTO
from halfbyte.entrypoints.decisions.temperatures import FILE_NAME, MAX_TEMPERATURE, MIN_TEMPERATURE, write_temperatures
from halfbyte.entrypoints.flag_table import ENGINE_FLAGS, LOG_LEVEL, REFUSED_FLAGS, SERVER_FLAGS, engine_options
from halfbyte.entrypoints.flags import Flag, UsageError, parse
from halfbyte.errors import HalfbyteError, UserError

if TYPE_CHECKING:
    from halfbyte.entrypoints.llm import LLM

KINDS: dict[str, str] = {"calibrate": "fit temperatures to labelled questions, and measure what they gain"}
CALIBRATE = (
    "Fit one temperature per type of question, so that a probability of 0.8 is right in 8 of 10 cases, and measure what that"
    " gains. A line of FILE is a JSON object with state, question and answer: true or false for a noul, the name of an option"
    " for a choice, the index of a level (0 is the lowest) for a score; or with state, questions and answers, two objects with"
    f" the same ids. A type needs {calibration.MIN_ITEMS} items. Gains are measured on questions that a temperature was not"
    " fitted to. Without --output no temperatures are written."
)

log = logging.getLogger(__name__)


def _check_file(name: str) -> None:
    if not Path(name).is_file():
        raise UserError(f"FILE: {name!r} is not a file")


def _output(name: str, help: str) -> Flag:
    def check(value: str) -> None:
        """Said before the measurement, not after it."""
        path = Path(value)
        if not value or path.is_dir() or not path.parent.is_dir():
            raise UserError(f"--{name}: {value!r} must be a file in a folder that exists")

    return Flag(name=name, help=help, check=check)


# The one flag of a server's prompts that `LLM` has, too.
_CHAT_TEMPLATE = replace(next(flag for flag in SERVER_FLAGS if flag.name == "chat-template"), owner="command", group="general")

FLAGS = (
    Flag(name="file", help="labelled questions, one JSON object per line", positional=True, check=_check_file),
    Flag(
        name="order",
        help="how options are listed; average reads each question in several orders, and fits what the server then does"
        " (default: given)",
        choices=lambda: ORDERS,
    ),
    _output("output", f"write the temperatures to this file, such as {FILE_NAME}; one that exists is replaced"),
    _output("json", "also write all measures and the probabilities of each question to this file"),
    Flag(name="plot", help="draw how often answers of each probability are right, before and after, into this file"),
    Flag(
        name="reader", help="how labels are read, as --decisions-config has it (default: auto)", choices=lambda: (AUTO, *READERS)
    ),
    _CHAT_TEMPLATE,
    LOG_LEVEL,
    *ENGINE_FLAGS,
)


@dataclass(frozen=True, slots=True)
class Job:
    """What the command's own flags say. output, document, picture: None where nothing is to be written.

    chat_template: a file or a text, None for the model's own. reader: one of READERS, or "auto".
    """

    file: Path
    order: Order
    output: Path | None
    document: Path | None
    picture: Path | None
    chat_template: str | None
    reader: str

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Job:
        """UsageError without a file, or when one file would be written over another."""
        if "file" not in given:
            raise UsageError("decisions calibrate needs a file of labelled questions: halfbyte decisions calibrate FILE.jsonl")
        paths = {"FILE": Path(given["file"])}
        for name in ("output", "json", "plot"):
            if name in given:
                path = Path(given[name])
                if other := next((known for known, taken in paths.items() if taken.resolve() == path.resolve()), None):
                    raise UsageError(f"--{name}: {given[name]!r} is {'the' if other == 'FILE' else 'also'} {other}; name another")
                paths[f"--{name}"] = path
        if "--plot" in paths:
            plot.check_path(paths["--plot"])
        order = check_order(given.get("order"))
        written = (paths.get("--output"), paths.get("--json"), paths.get("--plot"))
        return cls(paths["FILE"], order, *written, given.get("chat_template"), given.get("reader", AUTO))


@dataclass(frozen=True, slots=True)
class Report:
    """A calibration, and what it is of. items, answers: of the file, in its order."""

    model: str
    architecture: str
    job: Job
    items: list[Labelled]
    answers: list[Answer]
    found: Calibration


def run(argv: Sequence[str]) -> int:
    chosen = choose_kind("decisions", KINDS, argv)
    return 0 if chosen is None else run_calibrate(chosen[1])


def run_calibrate(argv: Sequence[str]) -> int:
    parsed = parse("decisions calibrate", CALIBRATE, FLAGS, argv, REFUSED_FLAGS)
    job = Job.of(parsed.command)
    model = engine_options(parsed).model  # wrong flags fail before torch is imported
    items = read_labelled(job.file)
    check_counts(items)
    template = {} if job.chat_template is None else {"chat_template": read_template(job.chat_template)}
    import halfbyte

    llm = halfbyte.LLM(**parsed.engine, **template, decisions_config={"reader": job.reader, "temperatures": "none"})
    try:
        architecture = llm.info.architecture
        answers = read_answers(llm, items, job.order)
    finally:
        llm.close()
    found = calibration.calibrate(samples_of(items, answers))
    report = Report(model, architecture, job, items, answers, found)
    for line in lines(report):
        print(line)
    keep(report)
    print(use_line(model, job), flush=True)
    return 0


def check_counts(items: Sequence[Labelled]) -> None:
    """UserError when no temperature at all could be fitted."""
    counts = Counter(item.question.type for item in items)
    if max(counts.values()) < calibration.MIN_ITEMS:
        told = ", ".join(f"{counts[kind]} {kind}" for kind in TYPES if counts[kind])
        raise UserError(f"FILE: a temperature needs at least {calibration.MIN_ITEMS} items of a type, there are {told}")


def read_answers(llm: LLM, items: Sequence[Labelled], order: Order) -> list[Answer]:
    """An answer per item. UserError names the line of a question that this model cannot be asked."""
    started_s = time.monotonic()
    log.info("reading %d questions, order %s", len(items), order)
    results = llm.decide_many([(item.state, {item.place: item.spec}, item.instructions) for item in items], order=order)
    log.info("read %d questions in %.1f s", len(items), time.monotonic() - started_s)
    return [result.answers[0] for result in results]


def samples_of(items: Sequence[Labelled], answers: Sequence[Answer]) -> dict[QuestionType, list[Sample]]:
    """By type, in the order of TYPES and of the file."""
    by_type: dict[QuestionType, list[Sample]] = {kind: [] for kind in TYPES}
    for item, answer in zip(items, answers, strict=True):
        by_type[item.question.type].append(Sample(answer.listing_logprobs, item.label, item.asked, item.state_text))
    return {kind: samples for kind, samples in by_type.items() if samples}


def lines(report: Report) -> Iterator[str]:
    """The table, then what must be known of it."""
    found, job = report.found, report.job
    yield f"{report.model} ({report.architecture}), {job.file.name}, order {job.order}"
    yield ""
    masses = label_masses(report)
    rows = [["type", "items", "groups", "label mass", "", "T", "accuracy", "NLL", "Brier", "ECE", "level error"]]
    for kind, result in found.by_type.items():
        about = [kind, str(result.num_items), f"{result.num_groups} {result.grouped_by}s", f"{masses[kind]:.3f}"]
        fitted = "-" if result.temperature is None else f"{result.temperature:.3f}"
        rows.append([*about, "before", "1.000", *_cells(result.before)])
        rows.append(["", "", "", "", "after", fitted, *(_cells(result.after) if result.temperature is not None else ["-"] * 5)])
    rows.append(["all", str(len(report.items)), "", "", "before", "", *_cells(found.before)])
    rows.append(["", "", "", "", "after", "", *_cells(found.after)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield ""
    yield (
        f"after: each item with a temperature that was fitted without its group ({calibration.NUM_FOLDS} folds); T itself is"
        f" fitted to all items. Intervals: 95%, {calibration.NUM_RESAMPLES} resamples of groups; noise adds to an ECE, so"
        " that its interval lies high"
    )
    for kind, result in found.by_type.items():
        yield from (f"{kind}: {remark}" for remark in _remarks(result))
    if job.order == "average":
        yield 'these temperatures are for requests with "order": "average"'


def label_masses(report: Report) -> dict[QuestionType, float]:
    """Of each type the mean share of all probability that is on the labels: little says that the model would answer otherwise."""
    found: dict[QuestionType, list[float]] = {}
    for item, answer in zip(report.items, report.answers, strict=True):
        found.setdefault(item.question.type, []).append(answer.label_mass)
    return {kind: math.fsum(masses) / len(masses) for kind, masses in found.items()}


def _cells(metrics: Metrics) -> list[str]:
    error = "-" if metrics.level_error is None else f"{metrics.level_error:.3f}"
    return [_cell(metrics.accuracy), f"{metrics.nll:.3f}", f"{metrics.brier:.3f}", _cell(metrics.ece), error]


def _cell(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} ({estimate.low:.2f} - {estimate.high:.2f})"


def _remarks(result: TypeResult) -> Iterator[str]:
    if result.temperature is None:
        yield f"{result.num_items} items, at least {calibration.MIN_ITEMS} are needed; left out, its temperature stays 1"
        return
    if result.grouped_by == "state":
        yield f"fewer than {calibration.NUM_FOLDS} different questions: the measures hold for these questions only"
    if result.temperature == MAX_TEMPERATURE:
        yield f"the temperature is the largest, {MAX_TEMPERATURE:g}: the model hardly tells right options from wrong ones"
    elif result.temperature == MIN_TEMPERATURE:
        yield f"the temperature is the smallest, {MIN_TEMPERATURE:g}: the likeliest option is nearly always the right one"
    if result.after.nll >= result.before.nll:
        yield "the temperature does not help with questions that it was not fitted to"


def keep(report: Report) -> None:
    """Write the files that were asked for. HalfbyteError when one cannot be written."""
    job = report.job
    if job.output is not None:
        if job.output.exists():
            log.warning("--output: %s exists and is replaced", job.output)
        try:
            write_temperatures(job.output, report.found.temperatures, notes(report))
        except OSError as error:
            raise HalfbyteError(f"--output: cannot write {job.output}: {error.strerror}") from None
        log.info("wrote %s", job.output)
    if job.document is not None:
        save(job.document, document(report) | {"environment": environment()})
    if job.picture is not None:
        plot.draw(report.found, f"{Path(report.model).name}, {job.file.name}, order {job.order}", job.picture)


def notes(report: Report) -> dict[str, Any]:
    """What stands beside the temperatures in their file."""
    return {
        "model": report.model,
        "architecture": report.architecture,
        "halfbyte": __version__,
        "date": datetime.now(UTC).date().isoformat(),
        "file": report.job.file.name,
        "order": report.job.order,
        "reader": report.job.reader,
        "chat_template": report.job.chat_template and _name(report.job.chat_template),
        "items": {kind: result.num_items for kind, result in report.found.by_type.items()},
        "label_mass": {kind: round(mass, 4) for kind, mass in label_masses(report).items()},
        "metrics": {
            kind: {"before": _short(result.before), "after": _short(result.after)}
            for kind, result in report.found.by_type.items()
            if result.temperature is not None
        },
    }


def _name(file_or_text: str) -> str:
    """A file without its folder, or the text."""
    return file_or_text if "\n" in file_or_text or "{" in file_or_text else Path(file_or_text).name


def _short(metrics: Metrics) -> dict[str, Any]:
    values = {"accuracy": metrics.accuracy.value, "nll": metrics.nll, "brier": metrics.brier, "ece": metrics.ece.value}
    values |= {} if metrics.level_error is None else {"level_error": metrics.level_error}
    return {name: round(value, 4) for name, value in values.items()}


def document(report: Report) -> dict[str, Any]:
    """Everything, as JSON holds it."""
    found = report.found
    temperatures = {kind: iter(result.item_temperatures) for kind, result in found.by_type.items()}
    pairs = zip(report.items, report.answers, strict=True)
    types = {kind: asdict(result) for kind, result in found.by_type.items()}
    for described in types.values():
        del described["item_temperatures"]  # they stand beside their items
    return notes(report) | {
        "temperatures": found.temperatures,
        "folds": calibration.NUM_FOLDS,
        "resamples": calibration.NUM_RESAMPLES,
        "types": types,
        "all": {"before": asdict(found.before), "after": asdict(found.after)},
        "items": [_described(item, answer, next(temperatures[item.question.type])) for item, answer in pairs],
    }


def _described(item: Labelled, answer: Answer, temperature: float) -> dict[str, Any]:
    """temperature: fitted without this item's group."""
    sample = Sample(answer.listing_logprobs, item.label, item.asked, item.state_text)
    listings = [[value if math.isfinite(value) else None for value in logprobs] for logprobs in answer.listing_logprobs]
    return {
        "id": item.id,
        "place": item.place,
        "type": item.question.type,
        "options": [option.name for option in item.question.options],
        "label": item.label,
        "listing_logprobs": listings,
        "label_mass": answer.label_mass,
        "argmax_is_label": answer.argmax_is_label,
        "temperature": temperature,
        "before": sample.predict(1.0).probabilities,
        "after": sample.predict(temperature).probabilities,
    }


def use_line(model: str, job: Job) -> str:
    """The last line: how a server comes to use the temperatures."""
    name = FILE_NAME if job.output is None else str(job.output)
    template = [] if job.chat_template is None else ["--chat-template", job.chat_template]
    reader = {} if job.reader == AUTO else {"reader": job.reader}
    flags = [*template, "--decisions-config", json.dumps(reader | {"temperatures": name})]
    how = f"use it: halfbyte serve {shlex.join([model, *flags])}, or put it beside the model as {FILE_NAME}"
    return how if job.output is not None else f"no temperatures were written; with --output {FILE_NAME}, {how}"
