"""One test per public bug report; its id is the report's address."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torch_tpu  # noqa: F401

from .reports import E

# Groups of reports by subject.
GROUPS = "ABCDEFGHIJ"


def address(report: dict[str, Any]) -> str:
    return report["urls"][0].removeprefix("https://github.com/")


CASES = [r for r in E if r["run"] and r["group"][0] in GROUPS]


@pytest.mark.parametrize("report", CASES, ids=address)
def test_report(report: dict[str, Any]) -> None:
    torch.manual_seed(0)
    names = {
        "torch": torch,
        "F": F,
        "nn": torch.nn,
        "dev": torch.device("tpu"),
        "BACKEND": "tpu",
        "copy": copy,
        "io": io,
        "math": math,
        "pickle": pickle,
        "gc": gc,
        "warnings": warnings,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(report["code"], address(report), "exec"), names)
