"""Layers and models of other projects with a forward pass that overflows in float16 at every loss scale."""

import importlib.metadata
import importlib.util
import re
import sys
import types

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
    """Experts that are added in place to a buffer in the dtype of the input; the output of one overflows."""

    def __init__(self, width, gain):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.experts[1].weight.data.mul_(gain)

    def forward(self, x):
        x = x.flatten(0, 1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.arange(index, len(x), 2)
            out.index_add_(0, rows, expert(x[rows]))
        return out.unflatten(0, (8, -1))


TEXT = torch.arange(24).reshape(2, 12)
IMAGES, LABELS = torch.linspace(-2, 2, 4 * 3 * 16 * 16).reshape(4, 3, 16, 16).sin(), torch.arange(4)
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ENCODER_AND_DECODER = {
    f"{part}_{name}": size
    for part in ("encoder", "decoder")
    for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
WITH_TEXT = {"input_ids": TEXT, "labels": TEXT}
TRANSFORMERS = {
    "T5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4, **TOKENS},
        WITH_TEXT,
    ),
    "Whisper": (
        "WhisperForConditionalGeneration",
        {"vocab_size": 64, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 16} | TOKENS | ENCODER_AND_DECODER,
        {"input_features": IMAGES.reshape(-1, 8, 32)[:2], "labels": TEXT},
    ),
    "Qwen2": ("Qwen2ForCausalLM", SIZES | HEADS, WITH_TEXT),
    "Mistral": ("MistralForCausalLM", SIZES | HEADS, WITH_TEXT),
    "Mamba": ("MambaForCausalLM", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, **TOKENS}, WITH_TEXT),
    "Swin": (
        "SwinForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4,
         "num_labels": 4},
        {"pixel_values": IMAGES, "labels": LABELS},
    ),
}  # fmt: skip
"""The class, the configuration and the inputs of tiny models of transformers."""


def model_of_transformers(name):
    """Return a model with random weights, and a function that returns its loss."""
    import transformers

    type_name, settings, inputs = TRANSFORMERS[name]
    model_type = getattr(transformers, type_name)
    model = model_type(model_type.config_class(**settings))
    return model, lambda: model(**inputs).loss


def model_of_timm(name, monkeypatch):
    """Return the same of timm; torchvision, of which its models need a class, has no build for this torch."""
    (place,) = importlib.util.find_spec("timm").submodule_search_locations
    for module, path in (("timm", place), ("timm.data", f"{place}/data"), ("timm.models", f"{place}/models")):
        package = types.ModuleType(module)
        package.__path__ = [path]
        monkeypatch.setitem(sys.modules, module, package)
    for module in ("torchvision", "torchvision.ops", "torchvision.ops.misc"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    sys.modules["torchvision.ops.misc"].FrozenBatchNorm2d = nn.BatchNorm2d
    sys.modules["timm"].__version__ = importlib.metadata.version("timm")
    from timm.data import constants

    vars(sys.modules["timm.data"]).update(vars(constants))
    if name == "ViT":
        from timm.models.vision_transformer import VisionTransformer

        model = VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=3, num_heads=4, num_classes=4)
    else:
        from timm.models._efficientnet_builder import decode_arch_def
        from timm.models.efficientnet import EfficientNet

        blocks = decode_arch_def([["ds_r1_k3_s1_e1_c8_se0.25"], ["ir_r2_k3_s2_e6_c16_se0.25"]])
        model = EfficientNet(blocks, num_classes=4, stem_size=8, num_features=32)
    return model, lambda: nn.functional.cross_entropy(model(IMAGES).float(), LABELS)


def make_loud(model, pattern, gain=1e6):
    """Multiply the weights of the modules with these names."""
    for name, module in model.named_modules():
        if re.fullmatch(pattern, name):
            module.weight.data.mul_(gain)
