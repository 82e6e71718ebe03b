"""A checkpoint with calibrated scales for an fp8 KV cache, made with llm-compressor from a model folder and a text.

    pip install "halfbyte[calibrate]"
    python examples/calibrate_kv.py MODEL OUT --text chats.txt

The model runs over pieces of the text; the largest |K| and |V| of each layer (or kv head), as they enter the cache, become its
scales, so that they are stored as 448, the greatest number of e4m3. OUT holds the weights as they were, the scales, and in
config.json a `kv_cache_scheme`, by which `halfbyte serve OUT` knows what to do. Take text like what will be served.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description="Calibrate the scales of an fp8 KV cache.")
    parser.add_argument("model", help="a Hugging Face folder, not quantised")
    parser.add_argument("out", help="the folder to write")
    parser.add_argument("--text", required=True, type=Path, help="UTF-8 text like what will be served")
    parser.add_argument(
        "--strategy", choices=("tensor", "attn_head"), default="tensor", help="one scale per layer, or per kv head"
    )
    parser.add_argument("--num-samples", type=int, default=512, help="pieces of text to run (default %(default)s)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a piece (default %(default)s)")
    args = parser.parse_args()
    if args.num_samples < 1 or args.length < 1:
        parser.error("--num-samples and --length must be at least 1")
    samples = read_samples(args.model, args.text, args.num_samples, args.length)
    if not samples:
        parser.error(f"{args.text} has fewer than {args.length} tokens: take a longer text or a smaller --length")
    print(f"calibrating on {len(samples)} pieces of {args.length} tokens", flush=True)
    calibrate(args.model, args.out, samples, args.strategy)


def read_samples(model: str, text: Path, num_samples: int, length: int) -> list[list[int]]:
    """Up to `num_samples` pieces of `length` token ids, spread evenly over the text."""
    from transformers import AutoTokenizer

    token_ids = AutoTokenizer.from_pretrained(model)(text.read_text(encoding="utf-8"), verbose=False).input_ids
    num_pieces = len(token_ids) // length
    num_samples = min(num_samples, num_pieces)
    starts = [i * num_pieces // num_samples * length for i in range(num_samples)]
    return [token_ids[start : start + length] for start in starts]


def calibrate(model: str, out: str, samples: list[list[int]], strategy: str) -> None:
    """Runs the samples through the model and writes it, with its scales, to `out`."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    scheme = {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "dynamic": False,
        "symmetric": True,
        # The largest of all pieces. The default follows a moving average, beyond which numbers would be clipped.
        "observer": "static_minmax",
    }
    oneshot(
        model=model,
        dataset=Dataset.from_dict({"input_ids": samples, "attention_mask": [[1] * len(ids) for ids in samples]}),
        recipe=QuantizationModifier(kv_cache_scheme=scheme),
        num_calibration_samples=len(samples),
        max_seq_length=len(samples[0]),
        output_dir=out,
    )


if __name__ == "__main__":
    main()
