"""The flags of `halfbyte bench serve`, and the plan that they make. Names and defaults are vLLM's where they mean the same.

Knows what may be asked for together; asks no server. A wrong command line is a UsageError. Called by `bench serve` only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.entrypoints.bench.datasets import DATASET_FLAGS, DEFAULT_DATASET, fresh_seed
from halfbyte.entrypoints.bench.serve_metrics import GOODPUT_METRICS, METRICS
from halfbyte.entrypoints.bench.shared_flags import count_flag, range_check
from halfbyte.entrypoints.flag_table import ADMIN_KEY_VARIABLES, API_KEY_VARIABLES, LOG_LEVEL
from halfbyte.entrypoints.flags import Flag, UsageError, parse
from halfbyte.entrypoints.http_client import key_headers
from halfbyte.errors import UserError

# backend -> its route; a backend is a form of request
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
DEFAULT_NUM_PROMPTS = 1000
DEFAULT_REQUEST_TIMEOUT_S = 6 * 3600
RAMP_UP_STRATEGIES = ("linear", "exponential")


def _server(name: str, help: str, **rest: Any) -> Flag:
    return Flag(name=name, help=help, group="server", **rest)


def _load(name: str, help: str, **rest: Any) -> Flag:
    return Flag(name=name, help=help, group="load", **rest)


def _positive(name: str, help: str, group: str = "load") -> Flag:
    def check(value: float) -> None:
        if not value > 0:
            raise UserError(f"--{name} must be above 0, got {value:g}")

    return Flag(name=name, help=help, kind="number", check=check, group=group)


def _sampling(name: str, help: str, kind: Any = "number") -> Flag:
    return Flag(name=name, help=f"{help} (default: the server's)", group="sampling", kind=kind)


def _result(name: str, help: str, **rest: Any) -> Flag:
    return Flag(name=name, help=help, group="results", **rest)


SAMPLING_FLAGS = (
    _sampling("ignore-eos", "go on to the output length even if the model ends its answer", "switch"),
    _sampling("temperature", "0 takes the most likely token each time"),
    _sampling("top-p", "sample from the most likely tokens that make up this probability"),
    _sampling("top-k", "sample from this many most likely tokens", "integer"),
    _sampling("min-p", "least probability of a token, relative to the most likely one"),
    _sampling("frequency-penalty", "lowers a token with each time that it was generated"),
    _sampling("presence-penalty", "lowers every token that was generated"),
    _sampling("repetition-penalty", "divides the odds of every token that occurred"),
)

FLAGS = (
    LOG_LEVEL,
    _server("backend", "form of the requests (default: openai)", choices=lambda: tuple(ENDPOINTS)),
    _server("base-url", "where the server is, without /v1 (default: made of --host and --port)"),
    _server("host", "the server's host (default: 127.0.0.1)"),
    _server("port", "the server's port (default: 8000)", kind="integer"),
    _server("endpoint", "route of the requests (default: the backend's)"),
    _server("model", "which of its models (default: the first)"),
    _server("tokenizer", "model whose tokenizer makes the prompts (default: the served model's, else the server's /tokenize)"),
    _server("api-key", f"the server's key (default: {API_KEY_VARIABLES[0]})"),
    _server("header", "further headers, as NAME=VALUE", kind="texts"),
    _server("request-id-prefix", "X-Request-Id is this and a number (default: bench- and random digits)"),
    _server("extra-body", "further fields of each request", kind="json"),
    Flag(
        name="ready-check-timeout-sec",
        help="wait this long until the server answers a request (default: 0)",
        kind="number",
        check=range_check("ready-check-timeout-sec", 0, 1e9),
        group="server",
    ),
    _positive(
        "request-timeout-sec", f"a request fails when its answer takes longer (default: {DEFAULT_REQUEST_TIMEOUT_S})", "server"
    ),
    _server(
        "reset-prefix-cache", "empty the server's prefix cache before each run; the server needs --enable-admin", kind="switch"
    ),
    _server("admin-api-key", f"the server's key for that (default: {ADMIN_KEY_VARIABLES[0]})"),
    *DATASET_FLAGS,
    count_flag("num-prompts", "requests of a run", DEFAULT_NUM_PROMPTS, group="load"),
    count_flag("num-warmups", "requests before a run that do not count", 0, least=0, group="load"),
    _load("request-rate", "requests per second, inf for all at once; several values are a sweep (default: inf)", kind="texts"),
    _positive("burstiness", "shape of the gamma distribution of gaps: 1 is Poisson, less is burstier, inf even (default: 1)"),
    _load("max-concurrency", "requests in flight at most; several values are a sweep (default: no limit)", kind="texts"),
    _load("ramp-up-strategy", "let the request rate grow over the run", choices=lambda: RAMP_UP_STRATEGIES),
    _positive("ramp-up-start-rps", "request rate at the first request"),
    _positive("ramp-up-end-rps", "request rate at the last request"),
    _load("seed", "makes the prompts and their arrivals repeatable (default: a new one each time)", kind="integer"),
    *SAMPLING_FLAGS,
    _result("percentile-metrics", f"which latencies are reported (default: {','.join(METRICS)})"),
    _result("metric-percentiles", "which of their percentiles (default: 99)"),
    _result("goodput", f"count requests within these limits, as METRIC:MS ({', '.join(GOODPUT_METRICS)})", kind="texts"),
    _result("save-result", "write the result of each run to a JSON file", kind="switch"),
    _result("save-detailed", "with each request's times, text and error", kind="switch"),
    _result("append-result", "add each result as one line to the file", kind="switch"),
    _result("result-dir", "folder of the file (default: the current one)"),
    _result("result-filename", "its name (default: made of backend, rate, concurrency, model and time)"),
    _result("metadata", "further facts in the result, as KEY=VALUE", kind="texts"),
    _result("label", "word for the backend in the result and the file's name (default: the backend)"),
    _result("plot", "draw output throughput against time to first token into this file"),
    _result("disable-tqdm", "show no progress bar", kind="switch"),
)

REFUSED: Mapping[str, str] = {
    "--lora-modules": "there are no adapters; name the model with --model",
    "--lora-assignment": "there are no adapters; name the model with --model",
    "--served-model-name": "--model is what the server calls it; --tokenizer names the model whose tokenizer is used",
    "--tokenizer-mode": "the tokenizer's own file decides; leave it out",
    "--trust-remote-code": "code from model repositories is never run",
    "--skip-tokenizer-init": "prompts are made of tokens; without a tokenizer here the server's /tokenize is used",
    "--use-beam-search": "answers are streamed, which beams cannot be",
    "--logprobs": "use --extra-body with the fields of the backend's route",
    "--profile": "",
    "--insecure": "certificates are checked; use an http:// address",
    "--no-stream": "without a stream there is no time to first token",
    "--plot-timeline": "--plot draws a sweep; --save-detailed has the times of each request",
}


@dataclass(frozen=True, slots=True)
class Load:
    """One run of a sweep."""

    request_rate: float
    max_concurrency: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for, checked. `given` holds what needs no second look, by the flag's field.

    admin_headers: None where the server's cache is left as it is.
    """

    base_url: str
    headers: Mapping[str, str]
    admin_headers: Mapping[str, str] | None
    body: Mapping[str, Any]
    loads: tuple[Load, ...]
    seed: int
    percentile_metrics: tuple[str, ...]
    metric_percentiles: tuple[float, ...]
    goodput_ms: Mapping[str, float]
    metadata: Mapping[str, str]
    given: Mapping[str, Any]

    @property
    def backend(self) -> str:
        return str(self.given.get("backend", "openai"))

    @property
    def endpoint(self) -> str:
        return str(self.given.get("endpoint", ENDPOINTS[self.backend]))

    @property
    def request_timeout_s(self) -> float:
        return float(self.given.get("request_timeout_sec", DEFAULT_REQUEST_TIMEOUT_S))

    @property
    def dataset(self) -> str:
        return str(self.given.get("dataset_name", DEFAULT_DATASET))

    @property
    def num_prompts(self) -> int:
        return int(self.given.get("num_prompts", DEFAULT_NUM_PROMPTS))

    @property
    def num_warmups(self) -> int:
        return int(self.given.get("num_warmups", 0))

    @property
    def swept(self) -> str:
        """The field of Load that differs between the runs."""
        return "max_concurrency" if len(self.given.get("max_concurrency", ())) > 1 else "request_rate"

    @property
    def saves(self) -> bool:
        return bool(self.given.get("save_result") or self.given.get("append_result"))


def read_plan(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Plan:
    given = dict(parse("bench serve", "Measure an OpenAI-compatible server under load.", FLAGS, argv, REFUSED).command)
    loads = _loads(given)
    _check_arrivals(given, loads)
    _check_results(given, num_runs=len(loads))
    sampling = {flag.target: given[flag.target] for flag in SAMPLING_FLAGS if flag.target in given}
    metrics = _split(given.get("percentile_metrics", ",".join(METRICS)))
    if unknown := [metric for metric in metrics if metric not in METRICS]:
        raise UsageError(f"--percentile-metrics: {unknown[0]!r} is not one of {', '.join(METRICS)}")
    return Plan(
        base_url=_base_url(given),
        headers=_headers(given, environ),
        admin_headers=_admin_headers(given, environ),
        body=sampling | given.get("extra_body", {}),
        loads=loads,
        seed=given.get("seed", fresh_seed()),
        percentile_metrics=metrics,
        metric_percentiles=_percentiles(given.get("metric_percentiles", "99")),
        goodput_ms=_goodput(given),
        metadata=_pairs("metadata", "=", given),
        given=given,
    )


def _base_url(given: Mapping[str, Any]) -> str:
    if "base_url" in given:
        if "host" in given or "port" in given:
            raise UsageError("--base-url already says where the server is: leave --host and --port out")
        return str(given["base_url"]).rstrip("/")
    return f"http://{given.get('host', '127.0.0.1')}:{given.get('port', 8000)}"


def _headers(given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    headers = key_headers(given.get("api_key"), environ) | _pairs("header", "=", given)
    if not all(text.isascii() and text.isprintable() for text in (*headers, *headers.values())):
        raise UsageError("--header must be printable ASCII")
    return headers


def _admin_headers(given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str] | None:
    if not given.get("reset_prefix_cache"):
        if "admin_api_key" in given:
            raise UsageError("--admin-api-key is for --reset-prefix-cache: give both")
        return None
    return key_headers(given.get("admin_api_key"), environ, ADMIN_KEY_VARIABLES[0])


def _loads(given: Mapping[str, Any]) -> tuple[Load, ...]:
    """The runs, in the order of the values."""
    rates = [_number("request-rate", text, float) for text in given.get("request_rate", ["inf"])]
    limits = [_number("max-concurrency", text, int) for text in given.get("max_concurrency", [])] or [None]
    if len(rates) > 1 and len(limits) > 1:
        raise UsageError("one of --request-rate and --max-concurrency can be swept: give the other a single value")
    return tuple(Load(rate, limit) for rate in rates for limit in limits)


def _number(flag: str, text: str, kind: type[Any]) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not value > 0:
        raise UsageError(f"--{flag} must be {'integers' if kind is int else 'numbers'} above 0, got {text!r}")
    return value


def _check_arrivals(given: Mapping[str, Any], loads: Sequence[Load]) -> None:
    names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
    if not any(name in given for name in names):
        if "burstiness" in given and all(load.request_rate == math.inf for load in loads):
            raise UsageError("--burstiness is about the gaps between requests: it needs a finite --request-rate")
        return
    if not all(name in given for name in names):
        raise UsageError("--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps go together")
    if "request_rate" in given:
        raise UsageError("a ramp-up sets the request rate: leave --request-rate out")
    if math.inf in (given["ramp_up_start_rps"], given["ramp_up_end_rps"]):
        raise UsageError("--ramp-up-start-rps and --ramp-up-end-rps must be finite")


def _check_results(given: Mapping[str, Any], num_runs: int) -> None:
    if not (given.get("save_result") or given.get("append_result")):
        for name in ("save_detailed", "result_dir", "result_filename", "metadata", "label"):
            if given.get(name):
                raise UsageError(f"--{name.replace('_', '-')} is for --save-result: give both")
    if num_runs > 1 and "result_filename" in given and not given.get("append_result"):
        raise UsageError("the runs of a sweep cannot share a file: use --append-result, or leave --result-filename out")


def _split(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        percentiles = tuple(float(word) for word in _split(text))
    except ValueError:
        percentiles = (math.nan,)
    if not percentiles or not all(0 <= percentile <= 100 for percentile in percentiles):
        raise UsageError(f"--metric-percentiles must be numbers from 0 to 100, such as 50,99, got {text!r}")
    return percentiles


def _pairs(flag: str, separator: str, given: Mapping[str, Any]) -> dict[str, str]:
    pairs = {}
    for text in given.get(flag, []):
        name, found, value = text.partition(separator)
        if not found or not name:
            raise UsageError(f"--{flag}: expected a name and a value, as in NAME{separator}VALUE, got {text!r}")
        pairs[name.strip()] = value.strip()
    return pairs


def _goodput(given: Mapping[str, Any]) -> dict[str, float]:
    limits = _pairs("goodput", ":", given)
    for name in limits:
        if name not in GOODPUT_METRICS:
            raise UsageError(f"--goodput: {name!r} is not one of {', '.join(GOODPUT_METRICS)}")
    return {name: _number("goodput", text, float) for name, text in limits.items()}
