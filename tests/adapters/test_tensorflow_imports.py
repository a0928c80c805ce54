"""`import lossscale_tf` without the packages that it needs, and the names that a star import adds."""

import subprocess
import sys

import keras
import pytest

import lossscale_tf

WITHOUT_A_PACKAGE = """
import sys

class Missing:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            raise ModuleNotFoundError(name=name)

sys.meta_path.insert(0, Missing())
import lossscale_tf
"""


@pytest.mark.parametrize("package", ["keras", "tensorflow"])
def test_a_missing_package_names_its_command(package):
    """The message names the missing package and the command to run. Its cause is the original error."""
    command = [sys.executable, "-c", WITHOUT_A_PACKAGE, package]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    hint = f'{package} is not installed; run: pip install "lossscale[tensorflow]"'
    for words in (f"lossscale_tf needs TensorFlow and Keras, and {hint}", "direct cause"):
        assert words in said


def test_a_star_import_keeps_keras():
    """`from lossscale_tf import *` imports `LossScaleOptimizer` and `v1`, and does not replace `keras`."""
    names = {"keras": keras}
    exec("from lossscale_tf import *", names)
    assert names["keras"] is keras
    assert names["LossScaleOptimizer"] is lossscale_tf.keras.LossScaleOptimizer
    assert names["v1"] is lossscale_tf.v1
