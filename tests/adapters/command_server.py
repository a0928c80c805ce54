"""A process that imports torch once, and forks for each run of the command, or of a script without the command.

Each line of stdin is a request in JSON: the arguments, whether they are of the command, the folder and environment, and
the files for the output. The answer is a line with the exit status, negative for a signal, as `subprocess` has it.
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
    request = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
for descriptor, path in enumerate([os.devnull, request["out"], request["err"]]):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
if request["is_command"]:
    sys.argv[1:] = ["run", *request["arguments"]]
    main()
else:
    sys.argv = request["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")
