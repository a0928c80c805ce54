"""`import lossscale_tf` without the packages that it needs, and the names that a star import adds."""

import subprocess
import sys

import pytest

import lossscale_tf

WITHOUT_A_PACKAGE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
try:
    import lossscale_tf
except ModuleNotFoundError as error:
    print(error, error.name, error.__cause__.name)
"""


@pytest.mark.parametrize("package", ["keras", "tensorflow"])
def test_a_missing_package_names_its_command(package):
    """If Keras or TensorFlow is missing, the import raises an error with the command that installs it."""
    command = [sys.executable, "-c", WITHOUT_A_PACKAGE, package]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == (
        f"lossscale_tf needs TensorFlow and Keras, and {package} is not installed; "
        f'run: pip install "lossscale[tensorflow]" {package} {package}\n'
    )


def test_a_star_import_keeps_keras():
    """`from lossscale_tf import *` imports the subpackage `v1`, and does not replace Keras."""
    assert "v1" in lossscale_tf.__all__
    assert "keras" not in lossscale_tf.__all__
