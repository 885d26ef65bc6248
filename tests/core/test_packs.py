"""Numbers that travel with a call: integers in one small array on the device, floats in another."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import random
import torch

draw = random.Random(0).random
x = torch.arange(8, dtype=torch.float32, device="tpu")
for n in range(20_000):
    alpha = draw()
    y = torch.add(x[n % 5 : n % 5 + 2], x[3:5], alpha=alpha)
    if n % 20 == 0:
        assert abs(y.tolist()[0] - (n % 5 + 3 * alpha)) < 1e-4
print("alive")
"""


def test_integers_and_floats_of_a_call_do_not_displace_each_other() -> None:
    """Of 20,000 pairs some have equal hashes; a call needs both of its arrays. glibc overwrites
    what is freed, so that the use of a freed one does not go unnoticed."""
    environment = {"MALLOC_PERTURB_": "170"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.strip() == "alive", done.stderr[-2000:]
