"""`python -m mkref` is the command `mkref`."""

from __future__ import annotations

import sys

from mkref.cli import main

if __name__ == "__main__":
    sys.exit(main())
