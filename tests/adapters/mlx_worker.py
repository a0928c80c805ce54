"""One of several processes that train together: run by `test_mlx_distributed.py` with its rank."""

import json
import math
import sys

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from lossscale_core import DynamicScaling
from lossscale_mlx import LossScaleOptimizer
from tests.adapters.mlx_training import batch, bits, network, squared_error


def main():
    """Take six steps on data of one's own, of which rank 1 has an infinite batch, and print what became of the run."""
    rank = mx.distributed.init(strict=True, backend="ring").rank()
    model = network()
    optimizer = LossScaleOptimizer(optim.Adam(0.1), DynamicScaling(init_scale=2.0**10), max_norm=1.0)
    applied = []
    for n in range(6):
        x, y = batch(10 * n + rank)
        x = x * (math.inf if (n, rank) == (2, 1) else 1.0)
        _, grads = optimizer.value_and_grad(model, squared_error)(model, x, y)
        optimizer.update(model, nn.average_gradients(grads))
        mx.eval(model.parameters(), optimizer.state)
        applied.append(optimizer.last_step.applied.item())
    end = {name: data.hex() for name, (_, data) in bits([model, optimizer.state]).items()}
    json.dump([applied, end], sys.stdout)


if __name__ == "__main__":
    main()
