"""A process that imports torch once, and forks for each run of a script, with `lossscale run` or without it.

Each line of stdin is a request in JSON: the folder, the environment, and the arguments of Python. The output goes to
two files in the folder. The answer is a line with the exit status, negative for a signal, as `subprocess` has it.
"""

import gc
import json
import os
import runpy
import sys

import torch._dynamo  # noqa: F401  # optimizers import it

import lossscale._recording
import lossscale.cli.run  # noqa: F401
from lossscale.__main__ import main

gc.freeze()  # so that the end of a process does not go through the modules
for line in sys.stdin:
    folder, environment, *arguments = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

os.chdir(folder)
os.environ.update(environment)
for descriptor, path in enumerate([os.devnull, "out.txt", "err.txt"]):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), descriptor)
if arguments[:2] == ["-m", "lossscale"]:
    sys.argv[1:] = arguments[2:]
    main()
else:
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
