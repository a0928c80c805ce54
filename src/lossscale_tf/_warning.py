"""Warnings that point at the user's code, also when they are issued deep within TensorFlow."""

import sys
import warnings
from pathlib import Path

import keras
import tensorflow as tf

_LIBRARIES = tuple(str(Path(path).parent) for path in (__file__, keras.__file__, tf.__file__))


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the first caller outside of this package, Keras and TensorFlow.

    The number of frames in between varies: AutoGraph wraps public methods, and a replica's step runs in a callback.
    """
    # `warnings.warn` has `skip_file_prefixes` for this from Python 3.12 on.
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
