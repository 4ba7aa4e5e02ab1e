"""Modules: functions with parameters, up to a GPT."""

from minidist.autograd.ops.rotary import RopeScaling
from minidist.nn.attention import CausalSelfAttention
from minidist.nn.config import GPTConfig, MixtureConfig, divisors
from minidist.nn.gpt import GPT, Block
from minidist.nn.hooks import HookHandle
from minidist.nn.layers import MLP, Dropout, DropoutKey, Embedding, LayerNorm, Linear, RMSNorm
from minidist.nn.module import Module
from minidist.nn.moe import Mixture, mixture
from minidist.nn.weights import Init, Weight

__all__ = [
    "GPT",
    "MLP",
    "Block",
    "CausalSelfAttention",
    "Dropout",
    "DropoutKey",
    "Embedding",
    "GPTConfig",
    "HookHandle",
    "Init",
    "LayerNorm",
    "Linear",
    "Mixture",
    "MixtureConfig",
    "Module",
    "RMSNorm",
    "RopeScaling",
    "Weight",
    "divisors",
    "mixture",
]
