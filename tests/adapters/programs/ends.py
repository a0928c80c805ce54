"""A script that ends in the way that its argument names."""

import argparse
import atexit
import multiprocessing
import os
import pickle
import signal
import sys
import threading


class Own:
    """A class of the script, which pickles must find."""


def show():
    print("late", type(pickle.loads(pickle.dumps(Own()))), sys.path[0], sys.argv)


def fail():
    try:
        {}["a"]
    except KeyError as error:
        raise ValueError("b") from error


def fail_with_hook():
    sys.excepthook = lambda *error: print("hook", error[:2])
    raise ValueError


def interrupt():
    raise KeyboardInterrupt


def fork():
    sys.stdout.flush()  # or the forked process prints the buffer again, unless it is ended before
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print(pool.map(type, [Own()]))


ENDINGS = {
    "end": lambda: None,
    "status": lambda: sys.exit(3),
    "killed": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "error": fail,
    "hook": fail_with_hook,
    "interrupted": interrupt,
    "forked": fork,
}

print(__file__, type(__loader__).__name__)
parser = argparse.ArgumentParser()
parser.add_argument("ending")
ending = ENDINGS[parser.parse_args().ending]
atexit.register(show)
threading.Thread(target=lambda: (threading.main_thread().join(), show())).start()
ending()
