"""Tells whether the package is being imported for its command line."""

from __future__ import annotations

import itertools
import sys


def started_as_module() -> bool:
    """True while ``python -m torch_tpu`` imports the package, before ``__main__`` runs.

    ``torch_tpu/__init__.py`` asks this when the native core cannot be loaded: the command line has
    to start all the same to say why. Python sets ``sys.argv[0]`` to ``"-m"`` for exactly that time.
    """
    if sys.argv[:1] != ["-m"]:
        return False
    words = sys.orig_argv
    return "-mtorch_tpu" in words or ("-m", "torch_tpu") in itertools.pairwise(words)
