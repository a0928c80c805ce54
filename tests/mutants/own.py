"""Read `own_tests.ini`: the test files of each module."""

import configparser
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "lossscale": "command/",
    "lossscale_core": "core/",
    "lossscale_torch": "adapters/torch_",
    "lossscale_jax": "adapters/jax_",
    "lossscale_tf": "adapters/tensorflow_",
    "lossscale_keras": "adapters/keras_",
}
"""The start of the names of a package's test files, below `tests` and without `test_`."""
_TABLE = configparser.ConfigParser()
_TABLE.optionxform = str
_TABLE.read(Path(__file__).with_name("own_tests.ini"), encoding="utf-8")
PACKAGES = _TABLE.sections()


def own_tests(package):
    """Return the test files of each module of a package, below `tests` and without `test_`."""
    start = FOLDERS[package.partition(".")[0]]
    named = {module: files.split() for modules, files in _TABLE[package].items() for module in modules.split()}
    modules = [path.stem for path in (ROOT / "src" / package.replace(".", "/")).glob("*.py")]
    listed = {module: [module.strip("_")] for module in modules} | named
    return {module: [file if "/" in file else start + file for file in files] for module, files in listed.items()}
