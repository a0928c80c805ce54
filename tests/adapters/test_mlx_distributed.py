"""Two processes on one machine, over MLX's ring: what averages gradients averages the decision, too."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def test_processes_that_average_gradients_decide_alike(tmp_path):
    """A bad batch on one of them skips the step on both, and all bits agree at the end."""
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(2)]))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.adapters.mlx_worker"],
            env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts), "PYTHONPATH": path},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        results = [json.loads(worker.communicate(timeout=120)[0]) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert results[0] == results[1]
    assert results[0][0] == [True, True, False, True, True, True]
