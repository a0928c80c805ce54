"""The words that users search for stand in headings of the site, which its search ranks above all other text."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FENCES = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
HEADINGS = [
    heading.replace("`", "")
    for page in sorted(DOCS.rglob("*.md"))
    for heading in HEADING.findall(FENCES.sub("", page.read_text(encoding="utf-8")))
]
SEARCHED = (
    *("bf16", "fp16", "fp8", "EMA", "LoRA", "GAN", "gradient accumulation", "retry", "resume"),
    *("DDP", "FSDP", "torch.compile", "CUDA graphs", "MPS"),
    *("TRL", "verl", "nanochat", "torchtitan", "Accelerate", "Lightning", "wandb", "TensorBoard"),
    *("loss is nan", "grad norm nan", "Attempting to unscale FP16 gradients"),
)


@pytest.mark.parametrize("words", SEARCHED)
def test_a_heading_has_the_words(words):
    """All of them as whole words, in one heading."""
    asked = words.lower().split()
    assert any(set(asked) <= set(re.findall(r"[\w.&]*\w", heading.lower())) for heading in HEADINGS)
