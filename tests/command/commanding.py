"""Run the `lossscale` command in this process, so that matplotlib is imported once."""

import contextlib
import io
import resource
from subprocess import CompletedProcess

from lossscale import cli


@contextlib.contextmanager
def room_for(size):
    """Let this process write at most `size` bytes to any file, as on a disk that is full after them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run(*arguments, cwd=".", room=None):
    """Run the command in a folder, with `room` for so many bytes in any file that it writes."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), room_for(room):
        try:
            cli.parse([*map(str, arguments)])
        except SystemExit as end:
            return CompletedProcess(arguments, end.code or 0, out.getvalue(), err.getvalue())
    return CompletedProcess(arguments, 0, out.getvalue(), err.getvalue())


def succeed(*arguments, cwd="."):
    """Return the data and the sentences of a command that works."""
    done = run(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def refused(done):
    """Return the line in which a command rejects its input."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("lossscale: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert len(done.stderr) < 3000
    return done.stderr
