"""`halfbyte bench serve`: load on any OpenAI-compatible server, and what its clients would see.

Asks the server what it serves, makes the prompts, runs each value of a sweep in turn, prints, saves and plots. The flags are in
`serve_flags`, sending is `load_generator`'s, arithmetic `serve_metrics`'. Called by `halfbyte bench`.
"""

from __future__ import annotations

import math
import random
import re
import resource
import time
import uuid
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from halfbyte.entrypoints.bench.datasets import BenchRequest, load_requests
from halfbyte.entrypoints.bench.plot import Point, check_path, draw
from halfbyte.entrypoints.bench.results import environment, save, summary
from halfbyte.entrypoints.bench.serve_flags import Load, Plan, read_plan
from halfbyte.entrypoints.bench.serve_metrics import Record, detail, measure, report, values_ms
from halfbyte.errors import HalfbyteError

if TYPE_CHECKING:
    from halfbyte.entrypoints.bench.load_generator import Call
    from halfbyte.entrypoints.bench.served_model import MeasuredServer, ServedModel

# Files and sockets of the process besides the connections of a run.
_SPARE_FILES = 64


def run(argv: Sequence[str]) -> int:
    plan = read_plan(argv)
    _prepare(plan)
    import uvloop

    from halfbyte.entrypoints.bench.served_model import MeasuredServer, find_tokenizer

    points = []
    with MeasuredServer(plan.base_url, plan.headers) as server:
        model = _find_model(plan, server)
        tokenizer_name, tokenizer = find_tokenizer(plan.given.get("tokenizer"), model, server)
        for index, load in enumerate(plan.loads):
            seed = plan.seed + index  # a run must not find the prompts of the one before in the server's cache
            sample = load_requests(plan.dataset, plan.given, tokenizer, plan.num_prompts + plan.num_warmups, seed)
            if plan.admin_headers is not None:
                server.reset_prefix_cache(plan.admin_headers)
            records = uvloop.run(_drive(plan, load, _calls(plan, model.name, sample.requests), seed))
            result = _configuration(plan, load, seed) | {"model_id": model.name, "tokenizer_id": tokenizer_name}
            result |= {"prefix_share": sample.prefix_share}
            result |= measure(records, plan.percentile_metrics, plan.metric_percentiles, plan.goodput_ms)
            if not result["completed"]:
                raise HalfbyteError(f"all {len(records)} requests failed: {next(iter(result['failure_reasons']))}")
            print("\n".join(report(result)), flush=True)
            if plan.saves:
                _save(plan, result | (detail(records) if plan.given.get("save_detailed") else {}))
            points.append(_point(plan, load, records, result))
    if "plot" in plan.given:
        title = f"{model.name}, {plan.dataset} prompts; beside each point: {plan.swept.replace('_', ' ')}"
        draw(points, title, Path(plan.given["plot"]))
    return 0


def _prepare(plan: Plan) -> None:
    """Find out before the run what would lose its result after it."""
    _require("aiohttp")
    if "plot" in plan.given:
        _require("matplotlib")
        check_path(Path(plan.given["plot"]))
    if plan.saves:
        folder = _result_path(plan, "default").parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HalfbyteError(f"--result-dir: cannot make {folder}: {error.strerror}") from None


def request_body(plan: Plan, model: str, prompt: str | list[int], output_len: int) -> bytes:
    """The JSON of one streamed request, in the form of the plan's backend."""
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if plan.backend == "openai-chat":
        body |= {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": output_len}
    else:
        body |= {"prompt": prompt, "max_tokens": output_len}
    return msgspec.json.encode(body | dict(plan.body))


def _require(package: str) -> None:
    if find_spec(package) is None:
        raise HalfbyteError(f"bench serve needs {package}, which the extra `bench` brings: pip install {package}")


def _find_model(plan: Plan, server: MeasuredServer) -> ServedModel:
    """What is measured, once the server is ready: with --ready-check-timeout-sec it must have answered a request."""
    asked, timeout_s = plan.given.get("model"), plan.given.get("ready_check_timeout_sec", 0)

    def probe() -> None:
        server.ask(plan.endpoint, request_body(plan, server.model(asked).name, "Are you ready?", 1))

    if timeout_s:
        server.wait_until_ready(probe, timeout_s)
    return server.model(asked)


def _calls(plan: Plan, model: str, requests: Sequence[BenchRequest]) -> list[Call]:
    from halfbyte.entrypoints.bench.load_generator import Call

    prefix = plan.given.get("request_id_prefix", f"bench-{uuid.uuid4().hex[:8]}-")
    calls = []
    for index, request in enumerate(requests):
        as_text = plan.backend == "openai-chat" or request.prompt_token_ids is None
        prompt = request.prompt if as_text else request.prompt_token_ids
        body = request_body(plan, model, prompt or "", request.output_len)
        calls.append(Call(body, f"{prefix}{index}", request.num_prompt_tokens))
    return calls


async def _drive(plan: Plan, load: Load, calls: Sequence[Call], seed: int) -> list[Record]:
    """Send the warm-ups, then the others as the load says. Only the records of these are returned."""
    from tqdm import tqdm

    from halfbyte.entrypoints.bench.load_generator import Client, RampUp, pace, start_offsets

    given = plan.given
    warmups, calls = calls[: plan.num_warmups], calls[plan.num_warmups :]
    rate: float | RampUp = load.request_rate
    if "ramp_up_strategy" in given:
        rate = RampUp(given["ramp_up_strategy"], given["ramp_up_start_rps"], given["ramp_up_end_rps"])
    offsets_s = start_offsets(len(calls), rate, given.get("burstiness", 1.0), random.Random(seed))
    _allow_connections(load.max_concurrency or len(calls))
    async with Client(plan.base_url + plan.endpoint, plan.headers, plan.request_timeout_s) as client:
        for record in await pace(lambda index: client.send(warmups[index]), [0.0] * len(warmups), load.max_concurrency):
            if record.error:
                raise HalfbyteError(f"a warm-up request failed: {record.error}")
        with tqdm(total=len(calls), unit="request", disable=given.get("disable_tqdm") or None) as bar:

            async def send(index: int) -> Record:
                record = await client.send(calls[index])
                bar.update()
                return record

            return await pace(send, offsets_s, load.max_concurrency)


def _allow_connections(num_connections: int) -> None:
    """Raise the limit of open files where it is too low; what exceeds the hard limit fails as requests."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _configuration(plan: Plan, load: Load, seed: int) -> dict[str, Any]:
    """What was asked for, as the result holds it. JSON has no infinity: it is a word."""
    given = plan.given
    numbers = {"request_rate": load.request_rate, "burstiness": given.get("burstiness", 1.0)}
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": plan.backend,
        "label": given.get("label"),
        "dataset_name": plan.dataset,
        "num_prompts": plan.num_prompts,
        "reset_prefix_cache": plan.admin_headers is not None,
        "seed": seed,
        **{name: "inf" if value == math.inf else value for name, value in numbers.items()},
        "max_concurrency": load.max_concurrency,
        **{name: given[name] for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps") if name in given},
    }


def _save(plan: Plan, result: dict[str, Any]) -> None:
    limit = f"-concurrency{result['max_concurrency']}" if result["max_concurrency"] else ""
    model = re.sub(r"[^\w.-]", "_", result["model_id"].rpartition("/")[2])
    default = f"{result['label'] or plan.backend}-{result['request_rate']}qps{limit}-{model}-{result['date']}.json"
    path = _result_path(plan, default)
    # metadata stands at the top as vLLM's does, where a name of the result's own wins, and complete in a place of its own
    document = dict(plan.metadata) | result | {"metadata": plan.metadata, "environment": environment()}
    save(path, document, append=bool(plan.given.get("append_result")))
    print(f"saved {path}", flush=True)


def _result_path(plan: Plan, default_name: str) -> Path:
    return Path(plan.given.get("result_dir", ".")) / plan.given.get("result_filename", default_name)


def _point(plan: Plan, load: Load, records: Sequence[Record], result: dict[str, Any]) -> Point:
    ttft = summary(values_ms(records, "ttft"), [99])
    return Point(f"{getattr(load, plan.swept):g}", result["output_throughput"], ttft["median"], ttft["p99"])
