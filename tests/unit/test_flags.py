"""The command line's grammar: each spelling of a value, each way to be wrong, one line each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from halfbyte.config import EngineOptions, ServerConfig
from halfbyte.entrypoints.bench import latency, startup, throughput
from halfbyte.entrypoints.commands import chat, fetch, generate, serve
from halfbyte.entrypoints.flag_table import (
    ENGINE_FLAGS,
    REFUSED_FLAGS,
    SERVER_FLAGS,
    engine_options,
    kv_cache_dtypes,
    server_config,
)
from halfbyte.entrypoints.flags import Flag, Parsed, UsageError, parse, parse_size
from halfbyte.resolve import UNSUPPORTED_KV_CACHE_DTYPES


def read(*words: str) -> Parsed:
    return parse("serve", "", serve.FLAGS, words, REFUSED_FLAGS)


def options(*words: str) -> EngineOptions:
    return engine_options(read(*words))


def server(*words: str, environ: Mapping[str, str] | None = None) -> ServerConfig:
    return server_config(read(*words), environ or {})


def complaint(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        server(*words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_given_is_the_default() -> None:
    assert options() == EngineOptions()
    assert server() == ServerConfig()


def test_every_field_has_one_flag_and_every_flag_one_field() -> None:
    assert sorted(flag.target for flag in ENGINE_FLAGS) == sorted(f.name for f in fields(EngineOptions))
    assert sorted(flag.target for flag in SERVER_FLAGS) == sorted(f.name for f in fields(ServerConfig))


@pytest.mark.parametrize(
    "flags",
    [serve.FLAGS, generate.FLAGS, chat.FLAGS, fetch.FLAGS, latency.FLAGS, throughput.FLAGS, startup.FLAGS],
)
def test_no_spelling_means_two_things(flags: tuple[Flag, ...]) -> None:
    spellings = [spelling for flag in flags if not flag.positional for spelling in flag.spellings]
    assert len(spellings) == len(set(spellings))


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        *((command.FLAGS, REFUSED_FLAGS) for command in (serve, generate, startup)),
        *((kind.FLAGS, kind.REFUSED) for kind in (latency, throughput)),
    ],
)
def test_no_flag_is_both_honoured_and_refused(flags: tuple[Flag, ...], refused: Mapping[str, str]) -> None:
    honoured = {spelling for flag in flags if not flag.positional for spelling in flag.spellings}
    assert not honoured & set(refused)


@pytest.mark.parametrize(
    "words", [["some/model"], ["--model", "some/model"], ["--model=some/model"], ["--port", "1", "some/model"]]
)
def test_model(words: list[str]) -> None:
    assert options(*words).model == "some/model"


def test_model_given_twice() -> None:
    assert complaint("a", "--model", "b") == "model is given twice: 'a' and --model 'b'"


@pytest.mark.parametrize("name", ["--max-num-seqs", "--max_num_seqs", "--max_num-seqs"])
def test_dashes_and_underscores(name: str) -> None:
    assert options(name, "7").max_num_seqs == 7
    assert options(f"{name}=7").max_num_seqs == 7


@pytest.mark.parametrize(("word", "value"), [("--enable-prefix-caching", True), ("--no-enable-prefix-caching", False)])
def test_switch(word: str, value: bool) -> None:
    assert options(word).enable_prefix_caching is value
    assert options(word.replace("-", "_").replace("__", "--", 1)).enable_prefix_caching is value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("1.5K", 1536),
        ("2m", 2_000_000),
        ("2M", 2**21),
        ("3g", 3 * 10**9),
        ("3G", 3 * 2**30),
    ]
    + [("25.6k", 25600), ("0", 0), ("-1", -1)],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value
    assert options("--kv-cache-memory-bytes", text).kv_cache_memory_bytes == value


@pytest.mark.parametrize("text", ["", "k", "4kb", "4 k k", "1e3", "0x10", "1.0001K", "٣", "nan"])
def test_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse_size(text)


@pytest.mark.parametrize(("text", "value"), [("auto", -1), ("AUTO", -1), ("-1", -1), ("32k", 32000), ("32K", 32768)])
def test_max_model_len(text: str, value: int) -> None:
    assert options("--max-model-len", text).max_model_len == value


def test_json_and_dotted_keys() -> None:
    assert options("--hf-overrides", '{"a": {"b": 1}}').hf_overrides == {"a": {"b": 1}}
    dotted = options(
        "--hf_overrides.rope_scaling.rope_type", "yarn", "--hf-overrides.rope_scaling.factor=4.0", "--hf-overrides.x=null"
    )
    assert dotted.hf_overrides == {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "x": None}
    both = options("--hf-overrides", '{"a": {"b": 1}}', "--hf-overrides.a.c", "2")
    assert both.hf_overrides == {"a": {"b": 1, "c": 2}}


def test_lists() -> None:
    found = server(
        "m", "--served-model-name", "a", "b", "--api-key", "k1", "--api-key", "k2", "--allowed-origins", '["https://a.b"]'
    )
    assert found.served_model_names == ("a", "b")
    assert found.api_keys == ("k1", "k2")
    assert found.allowed_origins == ("https://a.b",)


def test_api_keys_from_the_environment_only_without_the_flag() -> None:
    environ = {"HALFBYTE_API_KEY": "ours", "VLLM_API_KEY": "theirs"}
    assert server(environ=environ).api_keys == ("ours",)
    assert server(environ={"VLLM_API_KEY": "theirs", "HALFBYTE_API_KEY": ""}).api_keys == ("theirs",)
    assert server("--api-key", "flag", environ=environ).api_keys == ("flag",)
    assert server("--api-key", "", "x", environ=environ).api_keys == ("x",)


def test_admin_keys_and_routes_come_together() -> None:
    environ = {"HALFBYTE_API_KEY": "user", "HALFBYTE_ADMIN_API_KEY": "admin"}
    found = server("--enable-admin", environ=environ)
    assert found.enable_admin and (found.api_keys, found.admin_api_keys) == (("user",), ("admin",))
    assert server("--enable-admin", "--admin-api-key", "a", "b", environ=environ).admin_api_keys == ("a", "b")
    assert server(environ=environ).admin_api_keys == (), "the environment alone opens nothing"
    for words in (["--enable-admin"], ["--enable-admin", "--admin-api-key", ""]):
        with pytest.raises(UsageError, match="--enable-admin needs a key of its own: --admin-api-key KEY, or HALFBYTE_ADMIN"):
            server(*words, environ={"HALFBYTE_API_KEY": "user"})
    with pytest.raises(UsageError, match="--admin-api-key opens the routes of --enable-admin"):
        server("--admin-api-key", "a")


def test_dtype_aliases() -> None:
    found = options("--dtype", "half", "--kv-cache-dtype", "float")
    assert (found.dtype, found.kv_cache_dtype) == ("float16", "float32")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-modl-len", "3"], "unknown flag --max-modl-len; did you mean --max-model-len?"),
        (["--zzzzzz"], "unknown flag --zzzzzz; see --help"),
        (["-x"], "unknown flag -x; see --help"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size is not supported yet: this version runs on one device"),
        (["-tp", "2"], "-tp is not supported yet: this version runs on one device"),
        (["--tensor_parallel_size=2"], "--tensor-parallel-size is not supported yet: this version runs on one device"),
        (["--no-data-parallel-hybrid-lb"], "--no-data-parallel-hybrid-lb is not supported yet: this version runs on one device"),
        (
            ["--compilation-config.mode", "3"],
            "--compilation-config is not supported yet: use --cudagraph-mode",
        ),
        (["-O3"], "-O3 is not supported yet"),
        (["--enable-sleep-mode"], "--enable-sleep-mode is not supported yet"),
        (["--port"], "--port: expected one argument"),
        (["--port", "x"], "--port: 'x' is not an integer"),
        (["--port", "65536"], "--port must be in [0, 65535], got 65536"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout must be 0 or more seconds"),
        (["--override-generation-config.temprature", "1"], "--override-generation-config has no 'temprature'"),
        (
            ["--override-generation-config.temperature", "hot"],
            "--override-generation-config: temperature must be a finite",
        ),
        (["--override-generation-config.top_k", "1.5"], "--override-generation-config: top_k must be an integer"),
        (["--override-generation-config.max_new_tokens", "0"], "--override-generation-config: max_new_tokens must be"),
        (["--override-generation-config.stop_token_ids", "7"], "stop_token_ids must be a list of token ids"),
        (["--default-chat-template-kwargs.messages", "[]"], "--default-chat-template-kwargs may not set messages"),
        (["--gpu-memory-utilization", "x"], "--gpu-memory-utilization: 'x' is not a number"),
        (["--kv-cache-memory-bytes", "4Q"], "--kv-cache-memory-bytes: '4Q' is not a size"),
        (["--hf-overrides", "{"], "--hf-overrides: '{' is not JSON"),
        (["--hf-overrides", "[1]"], "is not a JSON object"),
        (["--allowed-origins", "https://a.b"], """write '["https://example.org"]'"""),
        (["--allowed-origins", "[1]"], "is not a JSON list of texts"),
        (["--hf-overrides.a"], "--hf-overrides.a: expected a key and a value"),
        (["--hf-overrides.", "1"], "expected a key and a value"),
        (["--hf-overrides.a", "1", "--hf-overrides.a.b", "2"], "a is set to 1 already"),
        (["--port.x", "1"], "--port takes no dotted keys"),
        (["--device", "tpu"], "--device: 'tpu' is not one of auto, cpu, cuda, rocm"),
        (
            ["--kv-cache-dtype", "fp8_inc"],
            "--kv-cache-dtype fp8_inc is not supported; possible here: auto, fp8, bfloat16, float16, float32",
        ),
        (["--kv-cache-dtype", "x"], "--kv-cache-dtype must be one of auto, fp8, bfloat16, float16, float32"),
        (["--kv-cache-dtype", "k:fp8,v:x"], "--kv-cache-dtype k:fp8,v:x: K and V can each be one of"),
        (["--kv-check", "maybe"], "--kv-check: 'maybe' is not one of refuse, warn, off"),
        (["--load-format", "pt"], "--load-format pt is not supported yet"),
        (["--attention-backend", "FLASH_ATTN"], "--attention-backend: 'FLASH_ATTN' is not one of auto, cpu, flashinfer, "),
        (["--ssl-keyfile", "k"], "--ssl-keyfile and --ssl-certfile go together"),
        (["a", "b"], "unrecognized arguments: b"),
        (["--config"], "--config: expected a file"),
        (["--config", "/nonexistent.yaml"], "--config: cannot read /nonexistent.yaml"),
    ],
)
def test_wrong_line(words: list[str], message: str) -> None:
    assert message in complaint(*words)


@pytest.mark.parametrize("name", sorted(REFUSED_FLAGS))
def test_every_flag_that_is_not_there_yet_says_so(name: str) -> None:
    assert complaint(f"{name}=1").startswith(f"{name} is not supported yet")


def test_every_vllm_kv_format_is_refused_with_what_works() -> None:
    for name in UNSUPPORTED_KV_CACHE_DTYPES - set(kv_cache_dtypes()):
        assert "possible here: auto" in complaint("--kv-cache-dtype", name)


def test_text_that_looks_like_a_flag() -> None:
    def prompt(*words: str) -> Any:
        return parse("generate", "", generate.FLAGS, words, REFUSED_FLAGS).command["prompt"]

    assert prompt("--dashes are fine in a sentence") == "--dashes are fine in a sentence"
    assert prompt("-1") == "-1"
    assert prompt("--", "--max-tokens") == "--max-tokens"
    assert prompt("-") == "-"


class TestConfigFile:
    """`--config file.yaml`."""

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "halfbyte.yaml"

    def write(self, **values: Any) -> str:
        self.path.write_text(json.dumps(values))  # JSON is YAML
        return str(self.path)

    def test_values(self) -> None:
        path = self.write(
            model="m",
            max_model_len="32k",
            **{"max-num-seqs": 5, "enable-prefix-caching": False, "hf-overrides": {"a": 1}, "seed": None},
            port=9000,
            served_model_name=["a", "b"],
            allowed_origins=["https://a.b"],
            api_key="k",
        )
        found = options("--config", path)
        assert found == EngineOptions(
            model="m", max_model_len=32000, max_num_seqs=5, enable_prefix_caching=False, hf_overrides={"a": 1}
        )
        front = server(f"--config={path}")
        assert (front.port, front.served_model_names, front.allowed_origins) == (9000, ("a", "b"), ("https://a.b",))
        assert front.api_keys == ("k",)

    def test_command_line_wins(self) -> None:
        path = self.write(model="file", port=1, served_model_name=["file"], hf_overrides={"file": 1}, enable_prefix_caching=True)
        words = ("line", "--port", "2", "--config", path, "--served-model-name", "x", "--hf-overrides.line", "2")
        assert options(*words, "--no-enable-prefix-caching") == EngineOptions(
            model="line", hf_overrides={"line": 2}, enable_prefix_caching=False
        )
        assert (server(*words).port, server(*words).served_model_names) == (2, ("x",))

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"prot": 1}, ": unknown flag --prot; did you mean --port?"),
            ({"tensor-parallel-size": 2}, ": --tensor-parallel-size is not supported yet"),
            ({"port": "x"}, ": --port: 'x' is not an integer"),
            ({"port": [1]}, ": port must be a single value, got [1]"),
            ({"enable-prefix-caching": "yes"}, ": enable-prefix-caching must be true or false, got 'yes'"),
            ({"config": "other.yaml"}, ": config cannot stand in a file"),
            ({"kv-cache-dtype": "fp8_inc"}, ": --kv-cache-dtype fp8_inc is not supported"),
        ],
    )
    def test_wrong_value(self, values: dict[str, Any], message: str) -> None:
        assert complaint("--config", self.write(**values)) == complaint("--config", str(self.path))
        assert f"{self.path}{message}" in complaint("--config", str(self.path))

    @pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "1: 2\n", "text", "a: !!python/object/apply:os.getcwd []\n"])
    def test_no_mapping(self, text: str) -> None:
        self.path.write_text(text)
        assert "--config: " in complaint("--config", str(self.path))

    def test_empty_file(self) -> None:
        self.path.write_text("# nothing\n")
        assert options("--config", str(self.path)) == EngineOptions()
