"""Several engines on the same prompts, in turn (A B C A B C ...): their speeds, and the ratios of the first to the others.

    python benchmarks/compare.py benchmarks/specs/bf16.json --peers DIR [--out result.json] [--reps 5] [--cases d1 d8 p1024]

Each engine loads in a process of its own, under the interpreter that the spec names, and is stopped (SIGSTOP) except in its
turn: no thread of one engine can disturb another. Every repetition has fresh random prompts, the same for all engines; decoding
is greedy, end-of-text is ignored, and no engine keeps a prefix cache. Ratios are taken within a repetition, then summarised, so
that a slow minute of the machine cancels out. The exit code is 1 when tokens disagree more than the spec allows or an engine
fails, never for a time. benchmarks/README.md explains the spec and each number; `adapters/worker.py` is the other end.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from halfbyte.entrypoints.bench.results import Spread, environment, save  # noqa: E402
from halfbyte.errors import HalfbyteError, UserError  # noqa: E402

ADAPTERS = ("halfbyte", "transformers", "vllm", "llama_cpp")
WARM_UP_TOKENS = 4
CLOSE_LIMIT_S = 20.0
LIMITS_MODULE = "halfbyte.kernels.cpu.limits"

Measurement = dict[str, Any]  # what `worker.measure` returns


class EngineFailedError(HalfbyteError):
    """An engine's process did not start or did not answer."""


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of batch. `d8`: decode at batch 8; `p1024`: prefill of one prompt of 1024 tokens; `p128x8`: of eight of 128."""

    name: str
    batch_size: int
    prompt_len: int
    output_len: int

    @classmethod
    def from_name(cls, name: str, prompt_len: int, output_len: int) -> Case:
        """prompt_len, output_len: of decode cases; a prefill case ends with the first token."""
        if match := re.fullmatch(r"d([1-9]\d*)", name):
            return cls(name, int(match[1]), prompt_len, output_len)
        if match := re.fullmatch(r"p([1-9]\d*)(?:x([1-9]\d*))?", name):
            return cls(name, int(match[2] or 1), int(match[1]), 1)
        raise UserError(f"no case {name!r}: write d8 (decode, batch 8), p1024 or p128x8 (prefill, length x batch)")

    def prompts(self, rng: random.Random, token_ids: range) -> list[list[int]]:
        return [rng.choices(token_ids, k=self.prompt_len) for _ in range(self.batch_size)]

    def speeds(self, run: Measurement) -> dict[str, float]:
        """Tokens per second of one run, by what is counted; the first is what the case is about."""
        prefill = self.batch_size * self.prompt_len / run["first_tokens_s"]
        if self.output_len == 1:
            return {"prefill": prefill}
        whole_call = self.batch_size * self.output_len / run["call_s"]
        return {"decode": run["num_decoded_tokens"] / run["decode_s"], "whole call": whole_call, "prefill": prefill}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One entry of `engines`. cases: the names of those that it takes part in, None for all."""

    name: str
    adapter: Path
    python: str
    settings: dict[str, Any]
    env: dict[str, str]
    cases: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Spec:
    """A spec file, checked. min_share: of all requests of an engine, how many must begin with the same `num_agreeing` tokens."""

    engines: tuple[EngineSpec, ...]
    cases: tuple[Case, ...]
    token_ids: range
    num_agreeing: int
    min_share: float
    num_threads: int


_SPEC_KEYS = {
    "about": str,
    "cases": list,
    "prompt_len": int,
    "output_len": int,
    "num_threads": int,
    "max_model_len": int,
    "max_num_seqs": int,
    "token_ids": list,
    "expect_agreement": dict,
    "engines": dict,
}
_ENGINE_KEYS = {"adapter": str, "python": str, "model": str, "dtype": str, "options": dict, "env": dict, "cases": list}


def read_spec(path: Path, places: Mapping[str, Path | None], case_names: Sequence[str] | None = None) -> Spec:
    """Read and check a spec. places: what `{peers}` and `{models}` stand for, None where it was not given."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the spec {path}: {error}") from None
    _check_keys(document, _SPEC_KEYS, str(path), optional=("about", "num_threads"))
    num_threads = document.get("num_threads") or len(os.sched_getaffinity(0))
    shared = {name: document[name] for name in ("max_model_len", "max_num_seqs")} | {"num_threads": num_threads}
    engines = []
    for name, entry in document["engines"].items():
        _check_keys(entry, _ENGINE_KEYS, f"engine {name!r} of {path}", optional=("python", "dtype", "options", "env", "cases"))
        engines.append(_engine_spec(name, _fill_places(entry, places), shared))
    if not engines or engines[0].cases is not None:
        raise UserError(f"{path}: the first engine, to which the others are compared, must exist and take part in all cases")
    cases = {
        name: Case.from_name(name, document["prompt_len"], document["output_len"])
        for name in (*(case_names or document["cases"]), *(name for engine in engines for name in engine.cases or ()))
    }
    for case in cases.values():
        if case.batch_size > document["max_num_seqs"] or case.prompt_len + case.output_len > document["max_model_len"]:
            raise UserError(f"case {case.name} does not fit max_num_seqs or max_model_len of {path}")
    agreement = document["expect_agreement"]
    _check_keys(agreement, {"num_tokens": int, "share": float}, f"expect_agreement of {path}")
    if len(document["token_ids"]) != 2:
        raise UserError(f"{path}: token_ids must be the first id and the one after the last, got {document['token_ids']}")
    chosen = tuple(cases[name] for name in dict.fromkeys(case_names or document["cases"]))
    return Spec(tuple(engines), chosen, range(*document["token_ids"]), agreement["num_tokens"], agreement["share"], num_threads)


def _check_keys(document: Any, known: Mapping[str, type], where: str, optional: Sequence[str] = ()) -> None:
    if not isinstance(document, dict):
        raise UserError(f"{where} must be a JSON object")
    if unknown := sorted(set(document) - set(known)):
        raise UserError(f"{where} has no key {unknown[0]!r}; the keys are {', '.join(known)}")
    if missing := sorted(set(known) - set(optional) - set(document)):
        raise UserError(f"{where} lacks {', '.join(missing)}")
    for name, value in document.items():
        if not isinstance(value, known[name]):
            raise UserError(f"{where}: {name} must be of type {known[name].__name__}, got {value!r}")


def _fill_places(value: Any, places: Mapping[str, Path | None]) -> Any:
    """A part of a spec with every `{name}` of `places` replaced. A place that is needed but was not given is an error."""
    if isinstance(value, dict):
        return {name: _fill_places(item, places) for name, item in value.items()}
    if not isinstance(value, str):
        return value
    for name, place in places.items():
        if f"{{{name}}}" in value:
            if place is None:
                raise UserError(f"the spec names {value}: say where that is with --{name} DIR (benchmarks/setup_peers makes it)")
            value = value.replace(f"{{{name}}}", str(place))
    return value


def _engine_spec(name: str, entry: Mapping[str, Any], shared: Mapping[str, Any]) -> EngineSpec:
    adapter = HERE / "adapters" / f"{entry['adapter']}.py" if entry["adapter"] in ADAPTERS else Path(entry["adapter"])
    if not adapter.is_file():
        raise UserError(f"engine {name!r}: no adapter {entry['adapter']!r}: name {', '.join(ADAPTERS)} or a Python file")
    settings = {
        "model": entry["model"],
        "dtype": entry.get("dtype", "auto"),
        "options": entry.get("options", {}),
        **shared,
    }
    cases = tuple(entry["cases"]) if "cases" in entry else None
    return EngineSpec(name, adapter.resolve(), entry.get("python", sys.executable), settings, entry.get("env", {}), cases)


class EngineProcess:
    """An engine in a child process: running inside `measure`, stopped otherwise."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (open as long as the process)
        environ = os.environ | {"OMP_NUM_THREADS": str(spec.settings["num_threads"])} | spec.env
        try:
            self._process = subprocess.Popen(
                [spec.python, str(HERE / "adapters" / "worker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=environ,
                start_new_session=True,  # a process group of its own: signals reach the engine's helpers too
            )
        except OSError as error:
            self._log.close()
            raise EngineFailedError(f"{spec.name} cannot be started: {spec.python}: {error.strerror}") from None
        ready = self._ask({"adapter": str(spec.adapter), "settings": spec.settings})
        self.load_s: float = ready["load_s"]
        self.versions: dict[str, str] = ready["versions"]
        self._signal(signal.SIGSTOP)

    def measure(self, prompts: list[list[int]], output_len: int) -> Measurement:
        self._signal(signal.SIGCONT)
        try:
            return self._ask({"prompts": prompts, "output_len": output_len})
        finally:
            self._signal(signal.SIGSTOP)

    def pss_bytes(self) -> int:
        """The memory of the process group, with what processes share counted once."""
        total_bytes = 0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.getpgid(int(folder.name)) == self._process.pid:
                    rollup = (folder / "smaps_rollup").read_text()
                    total_bytes += 1024 * int(re.search(r"^Pss:\s+(\d+) kB", rollup, re.M)[1])  # type: ignore[index]
            except OSError:  # a process that has ended meanwhile
                continue
        return total_bytes

    def close(self) -> None:
        """Let the engine end by itself, so that it takes its shared memory along; then end what is left of its group."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # what a dead engine was asked last
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _ask(self, document: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(document), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._log.seek(0)
            print(f"--- {self.spec.name} printed:\n{self._log.read()[-4000:]}", file=sys.stderr)
            self.close()
            raise EngineFailedError(f"{self.spec.name} ended while it was asked to {'run' if 'prompts' in document else 'load'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            os.killpg(self._process.pid, number)


@dataclass(slots=True)
class Results:
    """All runs: case -> engine -> one measurement per repetition."""

    spec: Spec
    runs: dict[str, dict[str, list[Measurement]]] = field(default_factory=dict)

    def add(self, case: Case, engine: str, run: Measurement) -> None:
        self.runs.setdefault(case.name, {}).setdefault(engine, []).append(run)

    def numbers(self) -> dict[str, dict[str, list[Measurement]]]:
        """All runs without their tokens, which the seed makes again."""
        return {
            case: {
                engine: [{k: v for k, v in run.items() if k != "token_ids"} for run in runs] for engine, runs in by_engine.items()
            }
            for case, by_engine in self.runs.items()
        }

    def speeds(self, case: Case) -> dict[str, dict[str, list[float]]]:
        """What is counted -> engine -> tokens per second of each repetition."""
        found: dict[str, dict[str, list[float]]] = {}
        for engine, runs in self.runs[case.name].items():
            for run in runs:
                for metric, speed in case.speeds(run).items():
                    found.setdefault(metric, {}).setdefault(engine, []).append(speed)
        return found

    def agreement(self, cases: Iterable[Case]) -> dict[str, float]:
        """Engine -> the share of its requests in these cases whose first tokens are those of the first engine of the spec."""
        equal: dict[str, list[bool]] = {}
        for case in cases:
            runs = self.runs[case.name]
            heads = {
                engine: [ids[: self.spec.num_agreeing] for run in runs[engine] for ids in run["token_ids"]] for engine in runs
            }
            first, *others = heads
            for engine in others:
                equal.setdefault(engine, []).extend(a == b for a, b in zip(heads[first], heads[engine], strict=True))
        return {engine: sum(found) / len(found) for engine, found in equal.items()}

    def complaints(self) -> list[str]:
        """What is wrong with the tokens: too few or too many, or other ones than the first engine's."""
        found = []
        for case in self.spec.cases:
            for engine, runs in self.runs[case.name].items():
                lengths = {len(ids) for run in runs for ids in run["token_ids"]}
                if lengths != {case.output_len}:
                    found.append(f"{case.name}: {engine} made {sorted(lengths)} tokens per request instead of {case.output_len}")
        if found:
            return found
        return [
            f"{share:.0%} of {engine}'s requests begin like the first engine's, not {self.spec.min_share:.0%}"
            for engine, share in self.agreement(self.spec.cases).items()
            if share < self.spec.min_share
        ]


def compare(spec: Spec, reps: int, seed: int) -> tuple[Results, dict[str, Any]]:
    """Load all engines one after the other, warm each up on every case, then let them take turns.

    Returns the runs, and of each engine how long it took to load, its memory at the end and its versions.
    """
    results = Results(spec)
    engines: list[EngineProcess] = []
    try:
        for engine_spec in spec.engines:
            engines.append(EngineProcess(engine_spec))
            print(f"{engine_spec.name}: loaded in {engines[-1].load_s:.1f} s", flush=True)
        for rep in range(-1, reps):
            for case in spec.cases:
                prompts = case.prompts(random.Random(f"{seed} {rep} {case.name}"), spec.token_ids)
                for engine in engines:
                    if engine.spec.cases is not None and case.name not in engine.spec.cases:
                        continue
                    if rep < 0:
                        engine.measure(prompts, min(case.output_len, WARM_UP_TOKENS))
                    else:
                        results.add(case, engine.spec.name, engine.measure(prompts, case.output_len))
            print("warmed up" if rep < 0 else f"repetition {rep + 1} of {reps}", flush=True)
        facts = {e.spec.name: {"load_s": e.load_s, "pss_bytes": e.pss_bytes(), "versions": e.versions} for e in engines}
    finally:
        for engine in engines:
            engine.close()
    return results, facts


def measure_limits(num_threads: int) -> dict[str, Any] | None:
    """What the machine can do, from the kernels' own measurement, in a process that is gone before the engines come."""
    try:
        if importlib.util.find_spec(LIMITS_MODULE) is None:
            return None
    except ModuleNotFoundError:
        return None
    code = f"import json; from {LIMITS_MODULE} import measure; print(json.dumps(measure({num_threads})))"
    search_path = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
    environ = os.environ | {"PYTHONPATH": search_path, "OMP_NUM_THREADS": str(num_threads)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    if done.returncode:  # such as kernels that are not compiled here: no reason not to compare
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        print(f"the machine's limits are not measured: {reason}", file=sys.stderr)
        return {"not_measured": reason}
    limits: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return limits


def larger(before: dict[str, Any], after: dict[str, Any] | None) -> dict[str, Any]:
    """What the machine can do at most: a measurement that something disturbed shows less."""
    return {name: max(value, (after or {}).get(name, value)) for name, value in before.items()}


Table = dict[str, dict[str, dict[str, Spread]]]


def summary(results: Results, case: Case) -> Table:
    """What is counted -> engine -> `tokens_per_s`, and `times_as_fast`: the first engine's speed over this engine's."""
    table: Table = {}
    for metric, speeds in results.speeds(case).items():
        first = next(iter(speeds.values()))
        table[metric] = {
            engine: {
                "tokens_per_s": Spread.of(values),
                "times_as_fast": Spread.of([a / b for a, b in zip(first, values, strict=True)]),
            }
            for engine, values in speeds.items()
        }
    return table


def table_lines(case: Case, table: Table, agreement: Mapping[str, float]) -> Iterable[str]:
    """Markdown tables of one case."""
    yield f"### {case.name}: {case.batch_size} x {case.prompt_len} prompt tokens, {case.output_len} output tokens each"
    for metric, rows in table.items():
        first = next(iter(rows))
        yield ""
        yield f"| {metric}, tokens/s | median | min - max | {first}: times as fast | min - max | equal first tokens |"
        yield "|---|---:|---:|---:|---:|---:|"
        for engine, row in rows.items():
            speed, times = row["tokens_per_s"], row["times_as_fast"]
            cells = [f"{speed.median:.1f}", f"{speed.min:.1f} - {speed.max:.1f}"]
            if engine == first:
                cells += ["", "", ""]
            else:
                cells += [f"{times.median:.2f}", f"{times.min:.2f} - {times.max:.2f}", f"{agreement[engine]:.0%}"]
            yield f"| {engine} | {' | '.join(cells)} |"
    yield ""


def _plain(table: Table) -> dict[str, Any]:
    return {
        metric: {engine: {name: asdict(spread) for name, spread in row.items()} for engine, row in rows.items()}
        for metric, rows in table.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("spec", type=Path, help="benchmarks/specs/*.json, or one like them")
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    parser.add_argument("--reps", type=int, default=5, help="measured repetitions (default: 5)")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="such as d1 d8 p1024 p128x8 (default: the spec's)")
    parser.add_argument("--peers", type=Path, help="what {peers} in the spec is: the folder that setup_peers made")
    parser.add_argument("--models", type=Path, help="what {models} in the spec is (default: PEERS/models)")
    parser.add_argument("--seed", type=int, help="of the prompts (default: a new one, which the result records)")
    arguments = parser.parse_args(argv)
    if arguments.reps < 1:
        parser.error(f"--reps must be at least 1, got {arguments.reps}")
    try:
        return _run(arguments)
    except UserError as error:
        print(f"compare: error: {error}", file=sys.stderr)
        return 2
    except HalfbyteError as error:
        print(f"compare: error: {error}", file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace) -> int:
    peers = arguments.peers.absolute() if arguments.peers else None
    models = arguments.models.absolute() if arguments.models else peers and peers / "models"
    spec = read_spec(arguments.spec, {"peers": peers, "models": models}, arguments.cases)
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    before = measure_limits(spec.num_threads) if arguments.out is not None else None
    results, engines = compare(spec, arguments.reps, seed)
    limits = larger(before, measure_limits(spec.num_threads)) if before is not None else None
    tables = {case.name: summary(results, case) for case in spec.cases}
    agreement = {case.name: results.agreement([case]) for case in spec.cases}
    print()
    for case in spec.cases:
        print("\n".join(table_lines(case, tables[case.name], agreement[case.name])), flush=True)
    complaints = results.complaints()
    if arguments.out is not None:
        document = {
            "benchmark": "compare",
            "environment": environment(),
            "spec": json.loads(arguments.spec.read_text(encoding="utf-8")),
            "num_threads": spec.num_threads,
            "reps": arguments.reps,
            "seed": seed,
            "engines": engines,
            "limits": limits,
            "summary": {name: _plain(table) for name, table in tables.items()},
            "agreement": agreement,
            "wrong_output": complaints,
            "runs": results.numbers(),
        }
        save(arguments.out, document)
    for complaint in complaints:
        print(f"compare: wrong output: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
