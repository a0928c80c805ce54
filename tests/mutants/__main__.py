"""Mutation testing: find small faults of the code that the tests do not notice. `nox -s mutants` starts it.

cosmic-ray makes the mutants, because it accepts further operators and writes each mutant as a text. (mutmut 3 puts all
mutants of a function into one program, so that `jit`, `torch.compile` and AutoGraph trace another program. It does not
mutate class bodies.) cosmic-ray itself would start a process for each mutant and change the files in place. `worker.py`
forks instead from a process that has imported the frameworks, and uses a copy of `src`.
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
from own import PACKAGES, own_tests

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"

BACKENDS = ["tensorflow", "jax", "torch"]
IMPORTS = {  # the imports of a worker before it forks
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
    tables = [] if is_own else [own_tests(other) for other in PACKAGES if other.split(".")[0] == package.split(".")[0]]
    more = {file for table in tables for files in table.values() for file in files} - {*own}
    for files in (own, sorted(more)):
        runs = collections.defaultdict(list)
        for file in files:
            name, _, word = file.partition("@")
            is_for_all = package == "lossscale_keras" and "/tensorflow_" not in name
            for backend in BACKENDS if is_for_all else BACKENDS[:1]:
                runs[backend, word].append(f"tests/{name.replace('/', '/test_')}.py")
        yield from ((*kind, *paths) for kind, paths in runs.items())


class Mutant:
    """A mutant of a file of `src`: its text, its lines before and after, and the outcome of its tests."""

    def __init__(self, path, code):
        self.path, self.code, source = str(path.relative_to(SRC)), code, path.read_text()
        self.package, _, self.module = self.path.removesuffix(".py").replace("/", ".").rpartition(".")
        old, new = source.splitlines(), self.code.splitlines()
        steps = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        changed = [step for step in steps if step[0] != "equal"]
        (_, first, _, start, _), (_, _, last, _, end) = changed[0], changed[-1]
        self.line = first + 1
        self.before, self.after = (" ".join(" ".join(lines).split()) for lines in (old[first:last], new[start:end]))
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
    """Draw mutants with different programs, which also differ from the unchanged file."""
    candidates = [(path, *place) for path in paths for place in places(path.read_text())]
    random.Random(seed).shuffle(candidates)
    mutants, programs = [], {meaning(path.read_text()) for path in paths}
    while candidates and len(mutants) != count:
        path, operator, number = candidates.pop()
        code = mutate_code(path.read_text(), operator, number)
        try:
            program = meaning(code)
        except SyntaxError:  # cosmic-ray writes `not` before the name of a `:=`
            continue
        if program not in programs:
            mutants.append(Mutant(path, code))
        programs.add(program)
    return mutants


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
    for mutant in mutants:
        for package in ("all", mutant.package.split(".")[0]):
            counts[package][mutant.outcome] += 1
        if mutant.outcome in ("survived", "broken"):
            print(f"{mutant.outcome}: {mutant}")
    titles = ["package", *OUTCOMES, "share killed"]
    print(f"\n| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    is_good = True
    for package, outcomes in sorted(counts.items()):
        killed = outcomes["killed"] + outcomes["endless"]
        share = killed / max(1, killed + outcomes["survived"])
        is_good &= share >= (LOWEST if package == "all" else LOWEST_OF_PACKAGE)
        print(f"| {package} | " + " | ".join(str(outcomes[name]) for name in OUTCOMES) + f" | {share:.1%} |")
    return is_good


def print_tests(mutants):
    """Print how many mutants each test kills, and how many of them no other test kills."""
    files = {file for mutant in mutants for stage in stages(mutant.package, mutant.module, True) for file in stage[2:]}
    texts = {file: (ROOT / file).read_text() for file in files}
    tests = [f"{file}::{name}" for file in files for name in re.findall(r"^def (test_\w+)", texts[file], re.M)]
    kills, alone = collections.Counter(dict.fromkeys(tests, 0)), collections.Counter()
    for mutant in mutants:
        failed = {test.partition("[")[0] for test in mutant.failed}
        kills.update(failed)
        alone.update(failed if len(failed) == 1 else ())
    print("\n| kills | alone | test |\n|---|---|---|")
    for test in sorted(kills, key=lambda test: (alone[test], kills[test])):
        print(f"| {kills[test]} | {alone[test]} | {test} |")


def main():
    """Draw mutants, run the tests on them, and print the survivors."""
    parser = argparse.ArgumentParser("nox -s mutants --", description="Find small faults that no test notices.")
    parser.add_argument("what", nargs="*", default=["src"], help="files, folders or packages; otherwise all packages")
    parser.add_argument("--seed", type=int, default=68, help="another seed draws another sample")
    parser.add_argument("--count", type=int, help="number of mutants; by default 300, or all mutants of named files")
    parser.add_argument(
        "--own", action="store_true", help="run only the tests of a module, without the tests of its package"
    )
    parser.add_argument(
        "--tests", action="store_true", help="list how many mutants each test of a module kills, and kills alone"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of processes that run tests")
    options = parser.parse_args()
    roots = [path if (path := ROOT / name).exists() else SRC / name.replace(".", "/") for name in options.what]
    if missing := [name for name, path in zip(options.what, roots, strict=True) if not path.exists()]:
        parser.error(f"{', '.join(missing)} cannot be found; name files of src, or packages such as lossscale_core")
    paths = [path for root in roots for path in (sorted(root.rglob("*.py")) if root.is_dir() else [root])]
    mutants = draw(paths, options.seed, options.count or (300 if options.what == ["src"] else None))
    parts = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for package in sorted({mutant.package for mutant in mutants}):
            members = sorted((m for m in mutants if m.package == package), key=lambda mutant: mutant.path)
            for part in range(options.jobs):
                parts.append(pool.submit(run_mutants, package, members[part :: options.jobs], options))
    for part in parts:
        part.result()
    if options.tests:
        print_tests(mutants)
    sys.exit(not print_report(mutants))


if __name__ == "__main__":
    main()
