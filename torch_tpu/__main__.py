"""``python -m torch_tpu``; see torch_tpu.cli."""

from __future__ import annotations

import sys

from torch_tpu.cli import main

if __name__ == "__main__":
    sys.exit(main())
