"""The range report of PyTorch: the magnitudes in one forward and one backward pass of a model."""

from lossscale_torch.range._report import range_report

__all__ = ["range_report"]
