"""What tests cannot ask of older versions of torch."""

import pytest
import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
HAS_FSDP2_ON_CPU = TORCH >= (2, 7)
needs_fsdp2_on_cpu = pytest.mark.skipif(not HAS_FSDP2_ON_CPU, reason="FSDP2 does not run on a CPU before torch 2.7")
FSDP2 = pytest.param("fsdp2", marks=needs_fsdp2_on_cpu)
