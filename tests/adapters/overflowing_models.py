"""Layers and models of other projects with a forward pass that overflows in float16 at every loss scale."""

import re

import torch
from torch import nn


class Attention(nn.Module):
    """One head of attention; its softmax is written out and subtracts no maximum."""

    def __init__(self, width, gain):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.gain = gain

    def forward(self, x):
        scores = self.gain * self.query(x) @ self.key(x).transpose(-1, -2) / x.shape[-1] ** 0.5
        weights = scores.exp()
        return self.out(weights / weights.sum(-1, keepdim=True) @ self.value(x))


class Experts(nn.Module):
    """Experts that are added in place to a buffer in the dtype of the input."""

    def __init__(self, width):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x):
        x = x.flatten(0, 1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.arange(index, len(x), 2)
            out.index_add_(0, rows, expert(x[rows]))
        return out.unflatten(0, (8, -1))


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3}
HEADS = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
T5_SIZES = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4}
TRANSFORMERS = {
    "T5ForConditionalGeneration": (T5_SIZES, "encoder.block.1.*wo"),
    "Qwen2ForCausalLM": (SIZES | HEADS, r".*layers.1.mlp.(gate|up)_proj"),
    "MambaForCausalLM": (SIZES, ".*layers.1.*x_proj"),
}
"""The sizes of tiny models of transformers, and the modules whose weights are too large."""


def model_of_transformers(name):
    """Return a model with random weights, some of them too large, and a function that returns its loss."""
    import transformers

    sizes, pattern = TRANSFORMERS[name]
    model_type, text = getattr(transformers, name), torch.arange(24).reshape(2, 12)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = model_type(model_type.config_class(**sizes, **tokens))
    for path, module in model.named_modules():
        if re.fullmatch(pattern, path):
            module.weight.data.mul_(1e6)
    return model, lambda: model(input_ids=text, labels=text).loss
