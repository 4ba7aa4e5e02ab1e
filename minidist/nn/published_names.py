"""The names and settings of published models whose weights a GPT can have: GPT-2 and Llama.

    GPT-2: learned positions, LayerNorm, GELU in its tanh form, tied output. Linear weights are
    (inputs, outputs), as here, and c_attn gives all queries, all keys, all values, as qkv does.

        published, perhaps with "transformer." in front         here
        wte.weight, wpe.weight, ln_f                            tokens.weight, positions.weight, norm
        h.N.ln_1, h.N.ln_2                                      blocks.N.norm_attention, .norm_mlp
        h.N.attn.c_attn, h.N.attn.c_proj                        blocks.N.attention.qkv, .out
        h.N.mlp.c_fc, h.N.mlp.c_proj                            blocks.N.mlp.up, .down

    Llama: rotary positions in pairs (i, i + n/2), RMSNorm, gated SiLU, perhaps fewer key heads.
    The base of the rotary angles and their scaling (Llama 3.1) come from config.json.
    Linear weights are (outputs, inputs), transposed here; queries, keys and values are joined. It
    has no biases unless its config.json says so: here they are zero.

        model.embed_tokens.weight, model.norm                   tokens.weight, norm
        model.layers.N.input_layernorm                          blocks.N.norm_attention
        model.layers.N.post_attention_layernorm                 blocks.N.norm_mlp
        model.layers.N.self_attn.q_proj, k_proj, v_proj         blocks.N.attention.qkv
        model.layers.N.self_attn.o_proj                         blocks.N.attention.out
        model.layers.N.mlp.gate_proj, up_proj, down_proj        blocks.N.mlp.gate, .up, .down

    Both: lm_head.weight (outputs, inputs)                      head.weight (inputs, outputs), if untied

Source:  Radford et al. 2019; Touvron et al. 2023.
"""

import re
from dataclasses import dataclass
from typing import Any

HEAD = "lm_head.weight"
_NUMBER = "(0|[1-9][0-9]{0,5})"


@dataclass(frozen=True)
class Family:
    """The names of one kind of published model.

    Attributes: name, title   the word for commands, and for messages
                prefix     may stand in front of a name; our files have it
                top        {a name outside the blocks, without the prefix: the name here}; the first
                           is that of the token table
                blocks     what stands before a block's number
                parts      {a part of a block here: its published parts, joined along the outputs}
                turned     linear weights are (outputs, inputs)
                optional   the biases that may be missing: {a part of a block here: the setting of
                           config.json that says whether it has a bias}
                ignored    names of arrays that are no weights
                required   {a setting of config.json: the values that mean the computation of a GPT
                           here; the first is meant where the setting is missing}
                numbers    {a number of config.json: (the field of GPTConfig, the value that is
                           meant where the number is missing)}
                choices    fields of GPTConfig
                sizes      {a setting of config.json: the size of GPTConfig that it names}
                tied       whether the output is tied where config.json does not say
                words      further settings that our files have
    """

    name: str
    title: str
    prefix: str
    top: dict[str, str]
    blocks: str
    parts: dict[str, tuple[str, ...]]
    turned: bool
    optional: dict[str, str]
    ignored: str
    required: dict[str, tuple[Any, ...]]
    numbers: dict[str, tuple[str, float]]
    choices: dict[str, Any]
    sizes: dict[str, str]
    tied: bool
    words: dict[str, Any]

    @property
    def table(self) -> str:
        """Return the published name of the token table, with the prefix."""
        return self.prefix + next(iter(self.top))

    def here(self, theirs: str) -> tuple[str, int] | None:
        """Return the name here of a published weight, and its place among the joined ones; None if
        the family does not know it."""
        plain = theirs.removeprefix(self.prefix)
        if theirs == HEAD:
            return "head.weight", 0
        if plain in self.top:
            return self.top[plain], 0
        found = re.fullmatch(rf"{re.escape(self.blocks)}\.{_NUMBER}\.(.+)\.(weight|bias)", plain)
        for ours, parts in self.parts.items():
            if found and found[2] in parts:
                return f"blocks.{found[1]}.{ours}.{found[3]}", parts.index(found[2])
        return None

    def published(self, name: str) -> tuple[str, ...]:
        """Return the published names of a weight here, in the order in which they are joined."""
        if name == "head.weight":
            return (HEAD,)
        for theirs, ours in self.top.items():
            if ours == name:
                return (self.prefix + theirs,)
        _, number, rest = name.split(".", 2)
        part, _, kind = rest.rpartition(".")
        return tuple(
            f"{self.prefix}{self.blocks}.{number}.{theirs}.{kind}" for theirs in self.parts[part]
        )

    def is_turned(self, name: str) -> bool:
        """Return whether the published weight is the transpose of the one here."""
        if name == "head.weight":
            return True
        return self.turned and name.endswith(".weight") and not self.is_table_or_norm(name)

    def is_table_or_norm(self, name: str) -> bool:
        """Return whether a weight is no linear layer's."""
        return name in self.top.values() or ".norm_" in name


GPT2 = Family(
    name="gpt2",
    title="GPT-2",
    prefix="transformer.",
    top={
        "wte.weight": "tokens.weight",
        "wpe.weight": "positions.weight",
        "ln_f.weight": "norm.weight",
        "ln_f.bias": "norm.bias",
    },
    blocks="h",
    parts={
        "norm_attention": ("ln_1",),
        "attention.qkv": ("attn.c_attn",),
        "attention.out": ("attn.c_proj",),
        "norm_mlp": ("ln_2",),
        "mlp.up": ("mlp.c_fc",),
        "mlp.down": ("mlp.c_proj",),
    },
    turned=False,
    optional={},
    ignored=r"(transformer\.)?h\.[0-9]+\.attn\.(bias|masked_bias)",  # masks of older programs
    required={
        "model_type": ("gpt2",),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    numbers={"layer_norm_epsilon": ("norm_eps", 1e-5)},
    choices={"positions": "learned", "norm": "layer", "activation": "gelu"},
    sizes={
        "n_embd": "width",
        "n_layer": "layers",
        "n_head": "heads",
        "n_positions": "context",
        "vocab_size": "vocabulary",
        "n_inner": "hidden",
    },
    tied=True,
    words={"architectures": ["GPT2LMHeadModel"]},
)

LLAMA = Family(
    name="llama",
    title="Llama",
    prefix="model.",
    top={"embed_tokens.weight": "tokens.weight", "norm.weight": "norm.weight"},
    blocks="layers",
    parts={
        "norm_attention": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.out": ("self_attn.o_proj",),
        "norm_mlp": ("post_attention_layernorm",),
        "mlp.gate": ("mlp.gate_proj",),
        "mlp.up": ("mlp.up_proj",),
        "mlp.down": ("mlp.down_proj",),
    },
    turned=True,
    optional={
        "attention.qkv": "attention_bias",
        "attention.out": "attention_bias",
        "mlp.gate": "mlp_bias",
        "mlp.up": "mlp_bias",
        "mlp.down": "mlp_bias",
    },
    ignored=r"(model\.)?layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq",
    required={
        "model_type": ("llama",),
        "hidden_act": ("silu",),
    },
    numbers={"rms_norm_eps": ("norm_eps", 1e-6), "rope_theta": ("rope_theta", 10000.0)},
    choices={"positions": "rotary", "norm": "rms", "activation": "silu"},
    sizes={
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "key_heads",
        "max_position_embeddings": "context",
        "vocab_size": "vocabulary",
        "intermediate_size": "hidden",
        "head_dim": "head_width",
    },
    tied=False,
    words={"architectures": ["LlamaForCausalLM"]},
)

FAMILIES = {family.name: family for family in (GPT2, LLAMA)}
