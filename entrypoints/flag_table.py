"""The flags as data: those that this build honours, and those of vLLM that it does not have yet.

One row per field of `EngineOptions` and `ServerConfig`; a test compares them. Names on the command line are vLLM's. Choices
come from the registries, so that nothing advertised can fail. Called by the commands; imports no torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from halfbyte.config import DEFAULT_MODEL, EngineOptions, ServerConfig
from halfbyte.entrypoints.flags import Flag, Parsed, UsageError
from halfbyte.errors import Refusal, UnsupportedError, UserError
from halfbyte.log import LEVELS
from halfbyte.platform import DEVICES
from halfbyte.pooling import CONVERSIONS, RUNNERS
from halfbyte.resolve import (
    CPU_ACTIVATIONS,
    DTYPE_ALIASES,
    DTYPES,
    KV_ALIASES,
    KV_CHECKS,
    LOAD_FORMATS,
    LOGPROBS_MODES,
    QUANTIZATIONS,
    SCHEDULING_POLICIES,
    kv_cache_dtype_refusal,
    load_format_refusal,
)
from halfbyte.resolve_execution import COMPILE_MODES, GRAPH_MODES

# Keys may also come from the environment, where `ps` does not show them: the first of these that is set.
API_KEY_VARIABLES = ("HALFBYTE_API_KEY", "VLLM_API_KEY")
ADMIN_KEY_VARIABLES = ("HALFBYTE_ADMIN_API_KEY",)

UVICORN_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def kv_cache_dtypes() -> tuple[str, ...]:
    from halfbyte.kvcache.formats import FORMATS

    return ("auto", "fp8", *FORMATS)


def attention_backends() -> tuple[str, ...]:
    from halfbyte.kernels.attention import BACKENDS

    return ("auto", *BACKENDS)


def _check_attention_backend(name: str) -> None:
    """Vendors' back ends that are not here are refused at the start, which knows their limits."""
    from halfbyte.kernels.attention.vendors import VENDORS

    if name not in VENDORS and name not in attention_backends():
        raise UserError(f"--attention-backend: {name!r} is not one of {', '.join(attention_backends())}")


def _check_kv_cache_dtype(name: str) -> None:
    _raise(kv_cache_dtype_refusal(KV_ALIASES.get(name, name), kv_cache_dtypes()[1:]))


def _check_load_format(name: str) -> None:
    _raise(load_format_refusal(name))


def _check_port(port: int) -> None:
    if not 0 <= port <= 65535:
        raise UserError(f"--port must be in [0, 65535], got {port}", param="port")


def _seconds(flag: str) -> Callable[[float], None]:
    """The check of a flag that is a time."""

    def check(seconds: float) -> None:
        if not 0.0 <= seconds < math.inf:
            raise UserError(f"{flag} must be 0 or more seconds, got {seconds}")

    return check


def _check_body_limit(size: int) -> None:
    if size < 1:
        raise UserError(f"--max-body-bytes must be at least 1, got {size}", param="max_body_bytes")


def _check_sampling_overrides(given: Mapping[str, Any]) -> None:
    """What is wrong here would be an error of every request that leaves the field out."""
    from halfbyte.entrypoints.openai.sampling import WITH_MODEL_DEFAULT
    from halfbyte.types import SamplingParams

    flag = "--override-generation-config"
    possible = (*WITH_MODEL_DEFAULT, "max_new_tokens", "max_tokens", "stop_token_ids")
    if unknown := [name for name in given if name not in possible]:
        raise UserError(f"{flag} has no {unknown[0]!r}; it takes {', '.join(possible)}")
    for name, value in given.items():
        if value is None:  # takes back what the model recommends
            continue
        if name == "stop_token_ids" and not (isinstance(value, list) and all(type(item) is int for item in value)):
            raise UserError(f"{flag}: stop_token_ids must be a list of token ids, got {value!r}")
        field = "max_tokens" if name == "max_new_tokens" else name
        try:
            SamplingParams(**{field: value})
        except UserError as error:
            raise UserError(f"{flag}: {str(error).replace(field, name, 1)}") from None


def tool_parsers() -> tuple[str, ...]:
    from halfbyte.entrypoints.tool_parsers import TOOL_PARSERS

    return tuple(TOOL_PARSERS)


def reasoning_parsers() -> tuple[str, ...]:
    from halfbyte.entrypoints.reasoning_parsers import REASONING_PARSERS

    return tuple(REASONING_PARSERS)


def _check_tool_parser(name: str) -> None:
    kind, _, file = name.partition(":")
    if kind not in tool_parsers() or bool(file) != (kind == "regex"):
        shown = ("regex:FILE" if known == "regex" else known for known in tool_parsers())
        raise UserError(f"--tool-call-parser: {name!r} is not one of {', '.join(shown)}")


def _check_reasoning_config(given: Mapping[str, Any]) -> None:
    kinds: dict[str, type] = {"reasoning_start_str": str, "reasoning_end_str": str, "tool_calls_end_reasoning": bool}
    for name, value in given.items():
        if name not in kinds:
            raise UserError(f"--reasoning-config has no {name!r}; it takes {', '.join(kinds)}")
        if not isinstance(value, kinds[name]) or value == "":
            raise UserError(f"--reasoning-config: {name} must be a {'text' if kinds[name] is str else 'boolean'}, got {value!r}")


def _check_structured_outputs_config(given: Mapping[str, Any]) -> None:
    from halfbyte.entrypoints.openai.settings import StructureSettings

    StructureSettings.from_config(given)


def _check_decisions_config(given: Mapping[str, Any]) -> None:
    from halfbyte.entrypoints.decisions.settings import DecisionSettings

    DecisionSettings.from_config(given)


def _check_template_variables(given: Mapping[str, Any]) -> None:
    from halfbyte.entrypoints.chat_template import RESERVED_VARIABLES

    if reserved := sorted(RESERVED_VARIABLES & set(given)):
        raise UserError(f"--default-chat-template-kwargs may not set {', '.join(reserved)}")


def _raise(refusal: Refusal | None) -> None:
    if refusal is not None:
        raise UnsupportedError(refusal)


def _model(name: str, help: str, **rest: Any) -> Flag:
    return Flag(name=name, help=help, owner="engine", group="model", **rest)


def _cache(name: str, help: str, **rest: Any) -> Flag:
    return Flag(name=name, help=help, owner="engine", group="KV cache", **rest)


def _batch(name: str, help: str, **rest: Any) -> Flag:
    return Flag(name=name, help=help, owner="engine", group="scheduling", **rest)


def _http(name: str, help: str, **rest: Any) -> Flag:
    return Flag(name=name, help=help, owner="server", group="HTTP", **rest)


def _prompt(name: str, help: str, **rest: Any) -> Flag:
    return Flag(name=name, help=help, owner="server", group="prompts and answers", **rest)


LOG_LEVEL = Flag(name="log-level", help="least level of log lines; debug adds tracebacks (default: info)", choices=lambda: LEVELS)

ENGINE_FLAGS: tuple[Flag, ...] = (
    _model("model", f"catalogue name, .gguf file, folder or hub id (default: {DEFAULT_MODEL})"),
    _model("tokenizer", "folder or hub id of another tokenizer (default: the model's)"),
    _model("revision", "branch, tag or commit on the hub"),
    _model("hf-token", "token for private models on the hub"),
    _model("download-dir", "where downloads are kept (default: the user's cache folder)"),
    _model("load-format", f"how weights are read ({', '.join(LOAD_FORMATS)})", check=_check_load_format),
    _model("hf-overrides", "changes to the model's config", kind="json"),
    _model(
        "runner",
        "generate text, or pool hidden states to embeddings and scores: auto as the checkpoint says",
        choices=lambda: RUNNERS,
    ),
    _model("convert", "what a model is made into that pools: auto as the checkpoint says", choices=lambda: CONVERSIONS),
    _model("dtype", "type of weights and activations", choices=lambda: (*DTYPES, *DTYPE_ALIASES)),
    _model(
        "quantization",
        "how weights are stored: auto as in the file, none unpacked to --dtype, int8 in 8-bit blocks (CPU)",
        choices=lambda: QUANTIZATIONS,
        short="-q",
    ),
    _model(
        "cpu-activations",
        "what packed and int8 weights are multiplied with on a CPU: auto keeps the answers, int8 is faster and shifts them",
        choices=lambda: CPU_ACTIVATIONS,
    ),
    _model("device", "where the model runs", choices=lambda: DEVICES),
    _model("max-model-len", "longest prompt plus answer in tokens; auto fits the memory (default: the model's)", kind="length"),
    _model("seed", "seed for the requests that bring none (default: a new one each start)", kind="integer"),
    _model("attention-backend", "which attention kernels run", choices=attention_backends, check=_check_attention_backend),
    _model("num-threads", "CPU threads (default: what affinity and cgroup quota grant)", kind="integer"),
    _model("enforce-eager", "launch each step anew: no graphs, nothing compiled", kind="switch"),
    _model(
        "cudagraph-mode",
        "which batches a GPU runs as captured graphs: auto is the most that the attention back end allows",
        choices=lambda: GRAPH_MODES,
    ),
    _model(
        "cudagraph-capture-sizes",
        "tokens that captured batches have, to which others are padded (default: up to twice --max-num-seqs, at most 512)",
        kind="texts",
    ),
    _model("compile", "native compiles the model's PyTorch with torch.compile, without graphs", choices=lambda: COMPILE_MODES),
    _model("enable-lora", "serve LoRA adapters beside the model (default: off)", kind="switch"),
    _model("lora-modules", "adapters that are served from the start: NAME=FOLDER, or JSON with name and path", kind="texts"),
    _model("max-loras", "adapters that may be loaded at a time (default: 4, or as many as --lora-modules)", kind="integer"),
    _model("max-lora-rank", "highest rank of an adapter; memory is taken for it (default: 16)", kind="integer"),
    _cache("block-size", "tokens per KV block (default: 16)", kind="integer"),
    _cache("kv-cache-dtype", "format of cached keys and values", choices=kv_cache_dtypes, check=_check_kv_cache_dtype),
    _cache(
        "kv-cache-dtype-skip-layers",
        "layers whose cache stays in the model's dtype: numbers, or sliding_window (default: none)",
        kind="texts",
    ),
    _cache(
        "kv-cache-first-tokens",
        "tokens at the beginning of each sequence that stay in the model's dtype (default: 0; 16 for kv4, kv5, kv6)",
        kind="integer",
    ),
    _cache("kv-cache-plan", "file of `halfbyte kv-tune`: a KV format for each layer"),
    _cache("kv-calibration", "file of `halfbyte calibrate` (default: beside the model or in the cache folder, else made)"),
    _cache(
        "kv-check",
        "when a calibrated format loses too much on held-back text at start: refuse, warn, or off for no check",
        choices=lambda: KV_CHECKS,
    ),
    _cache("kv-cache-memory-bytes", "exact size of the KV cache, such as 4G (default: what the memory holds)", kind="size"),
    _cache(
        "gpu-memory-utilization",
        "part of a GPU's memory to use, or of what a CPU has free, in (0, 1] (default: 0.92; 0.5 on a CPU)",
        kind="number",
    ),
    _cache("num-gpu-blocks-override", "exact number of KV blocks (default: what the memory holds)", kind="integer"),
    _cache("enable-prefix-caching", "share KV blocks of equal prompt beginnings (default: on)", kind="switch"),
    _batch("max-num-seqs", "requests that run at once (default: 256; 64 on a CPU)", kind="size"),
    _batch("max-num-batched-tokens", "token budget of a step (default: 2048; 512 on a CPU)", kind="size"),
    _batch("max-num-queued-reqs", "waiting requests beyond which new ones get 503 (default: no limit)", kind="size"),
    _batch("max-num-queued-tokens", "waiting prompt tokens beyond which new requests get 503 (default: no limit)", kind="size"),
    _batch("long-prefill-token-threshold", "most prompt tokens of one request in a step (default: 0, no limit)", kind="size"),
    _batch(
        "max-num-mixed-tokens",
        "most prompt tokens in a step that also decodes; 0: no limit (default: 0; 24 in a server on a CPU)",
        kind="size",
    ),
    _batch("enable-chunked-prefill", "split long prompts over steps (default: on)", kind="switch"),
    _batch("scheduling-policy", "order of waiting requests", choices=lambda: SCHEDULING_POLICIES),
    _batch(
        "async-scheduling",
        "prepare and launch the next step while a step runs; answers stay the same (default: on for GPUs, off on a CPU)",
        kind="switch",
    ),
    _batch("max-logprobs", "most logprobs per token that a request may ask; -1: all (default: 20)", kind="integer"),
    _batch("logprobs-mode", "what logprobs report", choices=lambda: LOGPROBS_MODES),
)

SERVER_FLAGS: tuple[Flag, ...] = (
    _http("host", "address to listen on (default: 127.0.0.1)"),
    _http("port", "port to listen on (default: 8000)", kind="integer", check=_check_port),
    _http(
        "served-model-name",
        "names that requests may use; the first is reported (default: --model)",
        kind="texts",
        field="served_model_names",
    ),
    _http(
        "api-key", f"keys, any of which opens the API (default: {' or '.join(API_KEY_VARIABLES)})", kind="texts", field="api_keys"
    ),
    _http("enable-admin", "serve the routes of operators, such as /sleep; needs --admin-api-key", kind="switch"),
    _http(
        "admin-api-key",
        f"keys, any of which opens the routes of --enable-admin, and no others (default: {ADMIN_KEY_VARIABLES[0]})",
        kind="texts",
        field="admin_api_keys",
    ),
    _http("root-path", "path under which a proxy serves this"),
    _http("allowed-origins", "origins that browsers may call from (default: none)", kind="json_list"),
    _http("allowed-methods", "methods for those origins (default: all)", kind="json_list"),
    _http("allowed-headers", "headers for those origins (default: all)", kind="json_list"),
    _http("allow-credentials", "let browsers send credentials", kind="switch"),
    _http(
        "allowed-hosts",
        "names that the Host header may have, * for any (default: this machine's on a loopback address, else any)",
        kind="json_list",
    ),
    _http("enable-request-id-headers", "answer with X-Request-Id", kind="switch"),
    _http("disable-fastapi-docs", "serve no /docs and /openapi.json", kind="switch"),
    _http("ui", "serve the built-in page at / (default: on)", kind="switch"),
    _http("max-body-bytes", "largest request body (default: 32M)", kind="size", check=_check_body_limit),
    _http("ssl-keyfile", "private key: serve HTTPS"),
    _http("ssl-certfile", "certificate: serve HTTPS"),
    _http(
        "shutdown-timeout",
        "seconds to finish requests after SIGTERM (default: 0)",
        kind="number",
        field="shutdown_timeout_s",
        check=_seconds("--shutdown-timeout"),
    ),
    _http(
        "sse-keep-alive-interval",
        "seconds between comments in a silent stream (default: 0, none)",
        kind="number",
        field="sse_keep_alive_interval_s",
        check=_seconds("--sse-keep-alive-interval"),
    ),
    _http(
        "responses-store",
        "bytes of memory for responses that later requests continue or read; 0 keeps none (default: 64M)",
        kind="size",
        field="responses_store_bytes",
    ),
    _http(
        "responses-store-ttl",
        "seconds that a response is kept after its last use (default: 3600)",
        kind="number",
        field="responses_store_ttl_s",
        check=_seconds("--responses-store-ttl"),
    ),
    _http("uvicorn-log-level", "least level of the HTTP server's log lines (default: info)", choices=lambda: UVICORN_LEVELS),
    _http("disable-uvicorn-access-log", "no line per HTTP request", kind="switch"),
    _http("enable-log-requests", "a line per generation request", kind="switch"),
    _http("disable-log-stats", "no periodic line of throughput", kind="switch"),
    _prompt("chat-template", "file or text of a Jinja chat template (default: the model's)"),
    _prompt("default-chat-template-kwargs", "variables of the chat template", kind="json", check=_check_template_variables),
    _prompt("trust-request-chat-template", "let requests bring their own template", kind="switch"),
    _prompt("response-role", "role of the answers (default: assistant)"),
    _prompt(
        "tool-call-parser",
        "how the model writes tool calls; regex:FILE for a syntax of your own (docs/tool_calls.md)",
        check=_check_tool_parser,
    ),
    _prompt("enable-auto-tool-choice", "let the model itself decide to call tools", kind="switch"),
    _prompt("exclude-tools-when-tool-choice-none", "no tools in the prompt when they may not be called", kind="switch"),
    _prompt("reasoning-parser", "how the model sets its thoughts apart", choices=reasoning_parsers),
    _prompt(
        "reasoning-config",
        "changes to the reasoning parser: reasoning_start_str, reasoning_end_str, tool_calls_end_reasoning",
        kind="json",
        check=_check_reasoning_config,
    ),
    _prompt(
        "structured-outputs-config",
        "how structured answers are written: whitespace_pattern, disable_any_whitespace, disable_additional_properties,"
        " enable_in_reasoning",
        kind="json",
        check=_check_structured_outputs_config,
    ),
    _prompt(
        "decisions-config",
        'how structured decisions are read: reader (auto, next_token, lfm2), temperatures (a file, "none"; default: the file'
        " decision_temperatures.json beside the model)",
        kind="json",
        check=_check_decisions_config,
    ),
    _prompt("generation-config", "where sampling defaults come from: auto (the model), vllm (neutral) or a folder"),
    _prompt("override-generation-config", "changes to the sampling defaults", kind="json", check=_check_sampling_overrides),
    _prompt("enable-prompt-tokens-details", "report cached tokens in usage", kind="switch"),
    _prompt("enable-force-include-usage", "send usage with every chunk of every stream", kind="switch"),
)

_ONE_DEVICE = "this version runs on one device"
_NO_PLUGINS = "a syntax of your own is a file for --tool-call-parser regex:FILE"
_TEXT_ONLY = "models here read and write text only"
_NO_SPECULATION = "there is no speculative decoding; leave it out"
_OWN_GRAPH_FLAGS = "use --cudagraph-mode, --cudagraph-capture-sizes, --compile and --enforce-eager"
_NO_QUANTIZATION = "GGUF files keep their own quantisation; --quantization int8 makes 8-bit blocks of other weights"
_NO_TRANSFER = "KV stays in this process"

# vLLM's flags that this build does not have: what to do instead, or "" when there is nothing.
REFUSED_FLAGS: Mapping[str, str] = {
    **dict.fromkeys(("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"), _ONE_DEVICE),
    **dict.fromkeys(("--data-parallel-size", "-dp", "--decode-context-parallel-size", "-dcp", "-pcp"), _ONE_DEVICE),
    **dict.fromkeys(("--prefill-context-parallel-size", "--enable-expert-parallel", "-ep", "--enable-eplb"), _ONE_DEVICE),
    **dict.fromkeys(("--all2all-backend", "--distributed-executor-backend", "--disable-custom-all-reduce"), _ONE_DEVICE),
    **dict.fromkeys(("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--headless"), _ONE_DEVICE),
    **dict.fromkeys(("-dpr", "-dpl", "-dpa", "-dpp", "-dpb", "-dph", "-dpe"), _ONE_DEVICE),
    **dict.fromkeys(("--data-parallel-rank", "--data-parallel-size-local", "--data-parallel-address"), _ONE_DEVICE),
    **dict.fromkeys(("--data-parallel-rpc-port", "--data-parallel-backend", "--data-parallel-hybrid-lb"), _ONE_DEVICE),
    **dict.fromkeys(("--data-parallel-external-lb",), _ONE_DEVICE),
    **dict.fromkeys(("--api-server-count", "-asc"), "one process serves HTTP; run more servers behind a proxy"),
    "--max-cpu-loras": "all adapters that are loaded can run; use --max-loras",
    "--lora-dtype": "adapters have the model's --dtype",
    "--tool-parser-plugin": _NO_PLUGINS,
    "--tool-server": "the client runs the tools; leave it out",
    "--tool-strict-level": "tools that are strict say so in the request",
    **dict.fromkeys(("--limit-mm-per-prompt", "--mm-processor-kwargs", "--mm-processor-cache-gb"), _TEXT_ONLY),
    **dict.fromkeys(("--media-io-kwargs", "--language-model-only", "--allowed-local-media-path"), _TEXT_ONLY),
    **dict.fromkeys(("--allowed-media-domains", "--trust-request-mm-kwargs", "--enable-mm-embeds"), _TEXT_ONLY),
    **dict.fromkeys(("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens"), _NO_SPECULATION),
    **dict.fromkeys(("-O", "--optimization-level", "-cc", "--compilation-config", "--performance-mode"), _OWN_GRAPH_FLAGS),
    **dict.fromkeys(("--moe-backend", "--linear-backend"), "there is one of them on each device; leave it out"),
    **dict.fromkeys(("--quantization-config",), _NO_QUANTIZATION),
    **dict.fromkeys(("--kv-transfer-config", "--kv-events-config", "--ec-transfer-config"), _NO_TRANSFER),
    **dict.fromkeys(("--kv-offloading-size", "--kv-offloading-backend", "--cpu-offload-gb"), _NO_TRANSFER),
    "--calculate-kv-scales": "scales come from the checkpoint, or from `halfbyte calibrate MODEL`",
    "--prefix-caching-hash-algo": "blocks are keyed with sha256; leave it out",
    "--attention-config": "use --attention-backend",
    "-ac": "use --attention-backend",
    "--trust-remote-code": "code from model repositories is never run",
    "--code-revision": "code from model repositories is never run",
    "--tokenizer-mode": "the tokenizer's own file decides; leave it out",
    "--tokenizer-revision": "use --revision, or a folder with --tokenizer",
    "--hf-config-path": "use --hf-overrides",
    "--skip-tokenizer-init": "",
    "--enable-prompt-embeds": "",
    "--enable-sleep-mode": "any engine can sleep; --enable-admin serves the routes for it",
    "--stream-interval": "every token is streamed; leave it out",
    "--chat-template-content-format": "the template decides; leave it out",
    "--uds": "use --host and --port",
    "--middleware": "put a proxy in front",
    "--ssl-ca-certs": "put a proxy in front to check client certificates",
    "--ssl-cert-reqs": "put a proxy in front to check client certificates",
    "--ssl-ciphers": "put a proxy in front to choose ciphers",
    "--enable-ssl-refresh": "restart to read new certificates",
    "--enable-offline-docs": "/docs never needs the network; leave it out",
    "--disable-access-log-for-endpoints": "use --disable-uvicorn-access-log",
    "--disable-log-requests": "requests are not logged unless --enable-log-requests",
    **dict.fromkeys(("--enable-log-outputs", "--enable-log-deltas", "--max-log-len"), "texts of clients are not logged"),
    **dict.fromkeys(("--enable-per-request-metrics", "--enable-server-load-tracking"), "read /metrics"),
    **dict.fromkeys(("--otlp-traces-endpoint", "--collect-detailed-traces", "--kv-cache-metrics"), "read /metrics"),
    **dict.fromkeys(("--show-hidden-metrics-for-version", "--enable-mfu-metrics"), "read /metrics"),
    "--custom-histogram-buckets": "",
    **dict.fromkeys(("--enable-scale-out", "--tokens-only", "--grpc", "--omni"), ""),
    **dict.fromkeys(("--fingerprint-mode", "--fingerprint-value"), ""),
    **dict.fromkeys(("--h11-max-incomplete-event-size", "--h11-max-header-count"), "use --max-body-bytes"),
    **dict.fromkeys(("--weight-cache-socket-dir", "--weight-cache-master-port"), ""),
    "--swap-space": "preempted requests are computed again; leave it out",
}


def engine_options(parsed: Parsed) -> EngineOptions:
    return EngineOptions(**_plain(parsed.engine))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: DTYPE_ALIASES.get(value, value) if name in ("dtype", "kv_cache_dtype") else value for name, value in values.items()
    }


def server_config(parsed: Parsed, environ: Mapping[str, str] = os.environ) -> ServerConfig:
    """The HTTP front end's configuration; keys from the environment only when their flag is absent."""
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in parsed.server.items()}
    server = ServerConfig(**given)
    if (server.ssl_keyfile is None) != (server.ssl_certfile is None):
        raise UsageError("--ssl-keyfile and --ssl-certfile go together: give both or neither", param="ssl_keyfile")
    if server.admin_api_keys and not server.enable_admin:
        raise UsageError("--admin-api-key opens the routes of --enable-admin: give both or neither", param="admin_api_keys")

    def keys(field: str, variables: Sequence[str]) -> tuple[str, ...]:
        found = given[field] if field in given else [environ[name] for name in variables if environ.get(name)][:1]
        return tuple(key for key in found if key)

    admin_keys = keys("admin_api_keys", ADMIN_KEY_VARIABLES) if server.enable_admin else ()
    if server.enable_admin and not admin_keys:
        raise UsageError(
            f"--enable-admin needs a key of its own: --admin-api-key KEY, or {ADMIN_KEY_VARIABLES[0]} in the environment",
            param="admin_api_keys",
        )
    return replace(server, api_keys=keys("api_keys", API_KEY_VARIABLES), admin_api_keys=admin_keys)
