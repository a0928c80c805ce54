"""`import lossscale_tf` without the packages that it needs, and the names that a star import adds."""

import os
import subprocess
import sys

import pytest

import lossscale_tf


@pytest.mark.parametrize("package", ["keras", "tensorflow"])
def test_a_missing_package_names_its_command(package):
    """If Keras or TensorFlow is missing, the import raises an error with the command that installs it."""
    code = f"import sys; sys.modules['{package}'] = None; import lossscale_tf"
    environment = {**os.environ, "KERAS_BACKEND": "numpy"}  # so that Keras needs no framework
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stderr
    hint = f'{package} is not installed; run: pip install "lossscale[tensorflow]"'
    assert f"lossscale_tf needs TensorFlow and Keras, and {hint}" in said
    assert "direct cause" in said


def test_a_star_import_keeps_keras():
    """`from lossscale_tf import *` imports the subpackage `v1`, and does not replace Keras."""
    assert "v1" in lossscale_tf.__all__
    assert "keras" not in lossscale_tf.__all__
