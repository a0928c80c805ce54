"""The range report of PyTorch: which magnitudes one forward and one backward pass of a model compute."""

from lossscale_torch.range._report import range_report

__all__ = ["range_report"]
