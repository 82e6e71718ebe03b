"""What an adapter costs: the same work by a model that can have none, by one that could, by an adapter, and by four in a batch.

Random adapters of rank 16 at every linear module; engines in this process, interleaved in one run. Prints one JSON: milliseconds
per decoded token and per prompt token, medians, and ratios to the first with their quartiles (of pairs that ran one after the
other). Times are the process's own, so that what else runs on the machine counts less. Usage:

    python benchmarks/lora.py [--model smollm2-135m] [--reps 9] [--threads 1] [--batch 1] [--dtype auto] [--quantization auto]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from halfbyte import LLM, LoRARequest, SamplingParams
from halfbyte.model_runner.decoder_config import config_from_files
from halfbyte.model_runner.source import locate

ROOT = Path(__file__).resolve().parents[1]
DECODED, PROMPT = 48, 384


def write_adapter(folder: Path, model: str, seed: int, rank: int = 16) -> LoRARequest:
    decoder = config_from_files(locate(model), {})
    hidden, inner = decoder.hidden_size, decoder.intermediate_size
    query, key = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    shapes = {"self_attn.q_proj": (query, hidden), "self_attn.k_proj": (key, hidden), "self_attn.v_proj": (key, hidden)}
    shapes |= {"self_attn.o_proj": (hidden, query), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    shapes["mlp.down_proj"] = (hidden, inner)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(decoder.num_layers):
        for name, (num_outputs, num_inputs) in shapes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, num_inputs, generator=generator) / num_inputs**0.5
            tensors[f"{module}.lora_B.weight"] = torch.randn(num_outputs, rank, generator=generator) * 0.05
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return LoRARequest(folder.name, seed, str(folder))


def seconds(llm: LLM, lora_request: Any, prompts: list[list[int]], num_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    started_s = time.process_time()
    llm.generate(prompts, params, lora_request=lora_request, use_tqdm=False)
    return time.process_time() - started_s


def summary(found: list[float], beside: list[float], work: int) -> dict[str, Any]:
    ratios = sorted(a / b for a, b in zip(found, beside, strict=True))
    quarter = len(ratios) // 4
    spread = [round(ratios[quarter], 3), round(ratios[-1 - quarter], 3)]
    return {
        "ms": round(statistics.median(found) / work * 1e3, 4),
        "ratio": round(statistics.median(ratios), 3),
        "quartiles": spread,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--reps", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    asked = parser.parse_args()
    options: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 256 << 20, "enable_prefix_caching": False}
    options |= {"num_threads": asked.threads, "dtype": asked.dtype, "quantization": asked.quantization}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        adapters = [write_adapter(folder / f"a{seed}", asked.model, seed) for seed in range(1, 5)]
        without, able = (stack.enter_context(closing(LLM(asked.model, **options, enable_lora=on))) for on in (False, True))
        mixed = [adapters[i % 4] for i in range(asked.batch)]
        ways: dict[str, tuple[LLM, Any]] = {"without": (without, None), "no adapter": (able, None)}
        ways |= {"one adapter": (able, adapters[0]), "four adapters": (able, mixed)}
        short, long = [[[(7 * i + j) % 4000 + 10 for i in range(n)] for j in range(asked.batch)] for n in (8, PROMPT)]
        decode: dict[str, list[float]] = {name: [] for name in ways}
        prefill: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(asked.reps + 1):  # the first one warms up
            for name, (llm, adapter) in ways.items():
                times = seconds(llm, adapter, short, DECODED), seconds(llm, adapter, long, 1)
                if repeat:
                    decode[name].append(times[0])
                    prefill[name].append(times[1])
    work = {"decode": (decode, DECODED * asked.batch), "prefill": (prefill, PROMPT * asked.batch)}
    result = {
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
        ).stdout.strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, torch {torch.__version__}, python {platform.python_version()}",
        "command": " ".join(["benchmarks/lora.py", *sys.argv[1:]]),
        "results": {
            kind: {name: summary(times, found["without"], num_tokens) for name, times in found.items()}
            for kind, (found, num_tokens) in work.items()
        },
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
