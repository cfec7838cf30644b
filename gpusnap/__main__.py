"""`python -m gpusnap`: the command, from a checkout."""

from __future__ import annotations

import sys

from gpusnap.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
