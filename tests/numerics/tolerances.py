"""Every tolerance of the numerics tests, each with its reason. Load through the `tolerances` fixture.

Unless said otherwise a value bounds max |ours - theirs| / max |theirs| over all logits of one comparison.
"""

from __future__ import annotations

TOLERANCES: dict[str, float] = {
    # Two layers of float32: the same operations, summed in another order (stacked matrices, tiles of scores, steps of other
    # heights). Seen: 4.4e-6.
    "random_model_fp32": 2e-5,
    # bfloat16 has 8 bits of mantissa. transformers rounds scores and probabilities of attention to it as well, the law only
    # the output, so hidden states differ by one unit in the last place here and there. Seen: 4.6e-2.
    "random_model_bf16": 8e-2,
    # Root mean square distance to the same weights in float32 arithmetic, ours over transformers': we round less often, so it
    # is below 1 but for chance. Seen: 0.99.
    "bf16_rounding_of_transformers": 1.05,
    # 18 to 30 layers and real activations in float32. Seen: 0 for short prompts (every sum has the same order), 1.1e-6 where
    # the scores of a long one are cut into tiles.
    "real_model_fp32": 1e-5,
    # Two to four post-norm layers of float32: the same products and sums, in batches of other heights. Seen: 2.9e-6.
    "random_encoder_fp32": 2e-5,
}
