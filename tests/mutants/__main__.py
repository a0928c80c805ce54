"""Mutation testing: which small faults of the code no test notices. Started by `nox -s mutants`.

cosmic-ray makes the mutants: it takes operators of one's own, and one mutant is one text. (mutmut 3 puts all mutants
of a function beside each other into the code that runs, so that what `jit`, `torch.compile` and AutoGraph trace is
another program; and it mutates no class body.) Its way of running tests starts a process for each mutant and changes
the files in place, so `worker.py` forks instead, from a process that has imported the frameworks, on a copy of `src`.
"""

import argparse
import collections
import difflib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE

from operators import meaning, mutate_code, places
from own_tests import TESTS, own_tests

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"

BACKENDS = ["tensorflow", "jax", "torch"]
IMPORTS = {  # what the tests of a package import, and a worker has imported before it forks
    "lossscale": ["numpy", "click", "torch"],
    "lossscale_core": ["numpy", "array_api_strict", "hypothesis"],
    "lossscale_torch": ["torch", "hypothesis"],
    "lossscale_jax": ["jax", "optax", "hypothesis"],
    "lossscale_keras": BACKENDS,  # not Keras, which chooses its backend when it is imported
    "lossscale_tf": ["tensorflow", "keras", "tf_keras", "hypothesis"],
}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
OUTCOMES = ["killed", "endless", "survived", "broken"]
LOWEST, LOWEST_OF_PACKAGE = 0.90, 0.86  # some survivors are equivalent programs, which no test can kill


def stages(package, module, is_own):
    """Return the runs of pytest for a mutant, its own files first: the backend of Keras, a word for `-k`, the files."""
    own = own_tests(package)[module]
    tables = [] if is_own else [own_tests(each) for each in TESTS if each.split(".")[0] == package.split(".")[0]]
    more = {each for table in tables for files in table.values() for each in files} - {*own}
    for files in (own, sorted(more)):
        runs = collections.defaultdict(list)
        for each in files:
            name, _, word = each.partition("@")
            is_for_all = package == "lossscale_keras" and "/tensorflow_" not in name
            for backend in BACKENDS if is_for_all else BACKENDS[:1]:
                runs[backend, word].append(f"tests/{name.replace('/', '/test_')}.py")
        yield from ((*kind, *paths) for kind, paths in runs.items())


class Mutant:
    """A mutant of a file of `src`: its whole text, its lines before and after, its tests, and what came of them."""

    def __init__(self, path, code):
        self.path, self.code, source = str(path.relative_to(SRC)), code, path.read_text()
        self.package, _, self.module = self.path.removesuffix(".py").replace("/", ".").rpartition(".")
        old, new = source.splitlines(), self.code.splitlines()
        steps = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        changed = [each for each in steps if each[0] != "equal"]
        (_, first, _, start, _), (_, _, last, _, end) = changed[0], changed[-1]
        self.line = first + 1
        self.before, self.after = (" ".join(" ".join(each).split()) for each in (old[first:last], new[start:end]))
        self.outcome, self.failed = "", []

    def __str__(self):
        return f"src/{self.path}:{self.line}: `{self.before}` → `{self.after}`"

    def run(self, worker, is_own):
        module = self.package if self.module == "__init__" else f"{self.package}.{self.module}"
        tests = [*stages(self.package, self.module, is_own)]
        job = {"path": self.path, "module": module, "tests": tests, "code": self.code}
        print(json.dumps(job), file=worker.stdin, flush=True)
        if not (answer := worker.stdout.readline()):
            raise SystemExit(f"the worker of {self.package} ended at {self}")
        self.outcome, self.failed = json.loads(answer)
        print(f"{self.outcome}: {self}", file=sys.stderr, flush=True)


def draw(paths, seed, count):
    """Draw mutants, without those that compile to the program of another one or of the unchanged file."""
    everything = [(path, *place) for path in paths for place in places(path.read_text())]
    random.Random(seed).shuffle(everything)
    drawn, seen = [], {meaning(path.read_text()) for path in paths}
    while everything and len(drawn) != count:
        path, operator, number = everything.pop()
        code = mutate_code(path.read_text(), operator, number)
        try:
            program = meaning(code)
        except SyntaxError:  # cosmic-ray writes `not` before the name of a `:=`
            continue
        if program not in seen:
            drawn.append(Mutant(path, code))
        seen.add(program)
    return drawn


def run_mutants(package, mutants, options):
    """Run the tests on mutants of one package, in a process that has a copy of `src`."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(SRC, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        # CI: hypothesis draws the same examples each time, and keeps none. Bytecode of a mutant could outlive it.
        environment = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1", "CI": "1", **QUIET}
        imports = ",".join(IMPORTS[package.split(".")[0]])
        command = [sys.executable, Path(__file__).with_name("worker.py"), imports, *([] if options.tests else ["-x"])]
        piped = {"stdin": PIPE, "stdout": PIPE, "text": True, "cwd": ROOT, "env": {**os.environ, **environment}}
        with subprocess.Popen(command, **piped) as worker:
            for mutant in mutants:
                mutant.run(worker, options.own or options.tests)
            worker.stdin.close()


def print_report(mutants):
    """Print the survivors and a row for each package, and return whether enough mutants were killed."""
    counts = collections.defaultdict(collections.Counter)
    for each in mutants:
        for package in ("all", each.package.split(".")[0]):
            counts[package][each.outcome] += 1
        if each.outcome in ("survived", "broken"):
            print(f"{each.outcome}: {each}")
    titles = ["package", *OUTCOMES, "share killed"]
    print(f"\n| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    is_good = True
    for package, of in sorted(counts.items()):
        killed = of["killed"] + of["endless"]
        share = killed / max(1, killed + of["survived"])
        is_good &= share >= (LOWEST if package == "all" else LOWEST_OF_PACKAGE)
        print(f"| {package} | " + " | ".join(str(of[each]) for each in OUTCOMES) + f" | {share:.1%} |")
    return is_good


def print_tests(mutants):
    """Print how many mutants each test kills, and how many of them no other test kills."""
    files = {file for each in mutants for stage in stages(each.package, each.module, True) for file in stage[2:]}
    texts = {file: (ROOT / file).read_text() for file in files}
    tests = [f"{file}::{name}" for file in files for name in re.findall(r"^def (test_\w+)", texts[file], re.M)]
    kills, alone = collections.Counter(dict.fromkeys(tests, 0)), collections.Counter()
    for each in mutants:
        failed = {test.partition("[")[0] for test in each.failed}
        kills.update(failed)
        alone.update(failed if len(failed) == 1 else ())
    print("\n| kills | alone | test |\n|---|---|---|")
    for test in sorted(kills, key=lambda test: (alone[test], kills[test])):
        print(f"| {kills[test]} | {alone[test]} | {test} |")


def main():
    """Draw mutants, run the tests on them, and print what survived."""
    parser = argparse.ArgumentParser("nox -s mutants --", description="Find small faults that no test notices.")
    parser.add_argument("what", nargs="*", default=["src"], help="files, folders or packages; otherwise all packages")
    parser.add_argument("--seed", type=int, default=68, help="another seed draws another sample")
    parser.add_argument("--count", type=int, help="how many to draw: 300, or all mutants of what is named")
    parser.add_argument("--own", action="store_true", help="run the tests of a module, and not those of its package")
    parser.add_argument(
        "--tests", action="store_true", help="list what each of a module's tests kills, and kills alone"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many processes run tests")
    options = parser.parse_args()
    named = [path if (path := ROOT / each).exists() else SRC / each.replace(".", "/") for each in options.what]
    if missing := [each for each, path in zip(options.what, named, strict=True) if not path.exists()]:
        parser.error(f"{', '.join(missing)} cannot be found; name files of src, or packages such as lossscale_core")
    paths = [path for each in named for path in (sorted(each.rglob("*.py")) if each.is_dir() else [each])]
    mutants = draw(paths, options.seed, options.count or (300 if options.what == ["src"] else None))
    parts = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for package in sorted({each.package for each in mutants}):
            ours = sorted((each for each in mutants if each.package == package), key=lambda each: each.path)
            for part in range(options.jobs):
                parts.append(pool.submit(run_mutants, package, ours[part :: options.jobs], options))
    for part in parts:
        part.result()
    if options.tests:
        print_tests(mutants)
    sys.exit(not print_report(mutants))


if __name__ == "__main__":
    main()
