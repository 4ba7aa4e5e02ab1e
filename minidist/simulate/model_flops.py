"""Chapter 24 · FLOPs that a model needs for a batch, whatever a plan makes of it: the numerator of
MFU.

A weight of a matrix costs 2 FLOPs a token in forward and 4 in backward: 6 a token. Attention's
scores and its sum of values are products of tokens with tokens, of no weights: 12 · layers · width
· context a token, as if every token saw all others (published MFU do not subtract the causal half).
Under an attention pattern a token's keys are those in the blocks that it shows: none after its own
block. Lookups in tables, norms, biases, and what a plan computes twice do not count.

    MFU = tokens a second · FLOPs a token / (devices · peak FLOP/s of the precision)

Source:  Chowdhery et al. 2022 (PaLM), appendix B.
"""

from minidist.nn import GPTConfig
from minidist.nn.attention_pattern import scores_computed

PRODUCT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}
"""In which dtype the matrix products of each precision of a plan run."""


def weights_used(config: GPTConfig) -> float:
    """Return weights that a token is multiplied with: of the experts only those that it chose."""
    tables = config.vocabulary * (2 - config.tied) + config.context * (
        config.positions == "learned"
    )
    dense = config.numbers - config.expert_numbers - config.width * tables
    mixture = config.mixture
    chosen = (
        0.0
        if mixture is None
        else config.expert_numbers * min(1.0, mixture.top_k / mixture.experts)
    )
    return dense + chosen + config.width * config.vocabulary


def flops_a_token(config: GPTConfig) -> float:
    """Return the FLOPs of forward and backward, for a token of a full sequence."""
    pattern = config.attention_pattern
    context = config.context
    keys = context if pattern is None else scores_computed(pattern, context) / context
    return 6.0 * weights_used(config) + 12.0 * config.layers * config.width * keys
