"""Two real processes under `MultiWorkerMirroredStrategy`: a bad step of one worker is skipped on both."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("tensorflow_worker.py")


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_workers_decide_alike():
    """Two workers apply and skip the same steps, and end with the same bits, including the slots."""
    cluster = {"worker": [f"127.0.0.1:{_free_port()}" for _ in range(2)]}
    workers = []
    for index in range(2):
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        environment = {**os.environ, "TF_CONFIG": config, "TF_CPP_MIN_LOG_LEVEL": "3"}
        command, pipe = [sys.executable, str(WORKER)], subprocess.PIPE
        workers.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
    outputs = [worker.communicate(timeout=300) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
