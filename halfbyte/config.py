"""Configuration: what a user may ask (`EngineOptions`), and what it became (`EngineConfig`, frozen, with origins).

`resolve()` in `halfbyte.resolve` is the one pure function between the two. An option that is None was not given. No
environment variable changes results. Sizes are bytes or tokens as the suffix says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from halfbyte.adapters import LoraModule

DType = Literal["bfloat16", "float16", "float32"]
SchedulingPolicy = Literal["fcfs", "priority"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Engine settings as given by flags, a config file or `LLM(...)`; None means not given."""

    model: str = DEFAULT_MODEL
    tokenizer: str | None = None
    revision: str | None = None
    hf_token: str | None = None
    download_dir: str | None = None
    load_format: str = "auto"
    hf_overrides: Mapping[str, Any] | None = None
    runner: str = "auto"
    convert: str = "auto"
    dtype: str = "auto"
    quantization: str = "auto"
    cpu_activations: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    seed: int | None = None
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: Sequence[str] | None = None
    kv_cache_first_tokens: int | None = None
    kv_cache_plan: str | None = None
    kv_calibration: str | None = None
    kv_check: str = "refuse"
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    long_prefill_token_threshold: int | None = None
    max_num_mixed_tokens: int | None = None
    enable_chunked_prefill: bool | None = None
    scheduling_policy: str = "fcfs"
    async_scheduling: bool | None = None
    max_logprobs: int | None = None
    logprobs_mode: str = "raw_logprobs"
    attention_backend: str = "auto"
    num_threads: int | None = None
    enforce_eager: bool | None = None
    cudagraph_mode: str = "auto"
    cudagraph_capture_sizes: Sequence[int | str] | None = None
    compile: str = "none"
    enable_lora: bool | None = None
    lora_modules: Sequence[str | Mapping[str, Any]] | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model runs, in which precision, up to which length.

    max_model_len is -1 only before auto-fit; the engine replaces it when the KV capacity is known. runner: "generate" or
    "pooling"; convert: what it pools for, "embed" or "classify", or "none".
    """

    model: str
    tokenizer: str
    revision: str | None
    load_format: str
    hf_overrides: Mapping[str, Any]
    runner: str
    convert: str
    dtype: DType
    quantization: str
    cpu_activations: str
    device: str
    max_model_len: int
    seed: int | None
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache. `kv_cache_memory_bytes` is what the user fixed, else None: then it comes from free memory.

    layer_dtypes: the KV format of each layer; kv_cache_dtype is that of all which have no other. first_tokens: how many at the
    beginning of a sequence stay in the model's dtype, None: as the formats want it. kv_calibration: from `halfbyte calibrate`;
    None: found, or made when a format needs it. kv_check: what happens when a calibrated format fails its check at start.
    """

    block_size: int
    kv_cache_dtype: str
    layer_dtypes: tuple[str, ...]
    first_tokens: int | None
    kv_calibration: str | None
    kv_check: str
    kv_cache_memory_bytes: int | None
    memory_utilization: float
    num_blocks_override: int | None
    enable_prefix_caching: bool

    @property
    def layers_name(self) -> str:
        """The format of all layers, or all the formats that they have, for lines to be read by people."""
        return " and ".join(dict.fromkeys(self.layer_dtypes))


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The token budget and its limits. Counts are per step. max_num_mixed_tokens: of prompts, beside decodes; 0: no limit.

    async_scheduling: a step is launched before the result of the one before it is taken.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    long_prefill_token_threshold: int
    enable_chunked_prefill: bool
    policy: SchedulingPolicy
    max_logprobs: int
    logprobs_mode: LogprobsMode
    max_num_mixed_tokens: int = 0
    async_scheduling: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionConfig:
    """How a step is launched. cudagraph_mode "auto" is what the attention back end allows. cudagraph_capture_sizes: tokens that
    captured batches have, ascending; None: `model_runner.graph_plan` says. compile: "none" or "native" (torch.compile)."""

    cudagraph_mode: str
    cudagraph_capture_sizes: tuple[int, ...] | None
    compile: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Adapters beside the model. max_loras: how many may be loaded at a time; modules: those that are from the start."""

    max_loras: int
    max_lora_rank: int
    modules: tuple[LoraModule, ...] = ()

    @property
    def num_seats(self) -> int:
        """Room for adapters: one more than may be loaded, for one that was replaced while requests still use it."""
        return self.max_loras + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that the engine process needs, resolved once. lora: None when there are no adapters. `origins`: field ->
    default, flag, checkpoint or platform."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    execution: ExecutionConfig
    attention_backend: str
    lora: LoraConfig | None = None
    origins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP front end. Nothing here reaches the engine process."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    enable_admin: bool = False
    admin_api_keys: tuple[str, ...] = ()
    root_path: str = ""
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    allowed_hosts: tuple[str, ...] = ()
    enable_request_id_headers: bool = False
    disable_fastapi_docs: bool = False
    ui: bool = True
    uvicorn_log_level: str = "info"
    disable_uvicorn_access_log: bool = False
    enable_log_requests: bool = False
    disable_log_stats: bool = False
    chat_template: str | None = None
    response_role: str = "assistant"
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = False
    reasoning_parser: str | None = None
    reasoning_config: Mapping[str, Any] = field(default_factory=dict)
    structured_outputs_config: Mapping[str, Any] = field(default_factory=dict)
    decisions_config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    shutdown_timeout_s: float = 0.0
    sse_keep_alive_interval_s: float = 0.0
    responses_store_bytes: int = 64 * 1024 * 1024
    responses_store_ttl_s: float = 3600.0
    max_body_bytes: int = 32 * 1024 * 1024
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
