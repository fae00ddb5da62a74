"""The command `mkref`. Each group of commands has its own file; `main` ties them together.

Exit status: 0 done; 1 the command ran and the answer is no; 2 a mistake of the user, told in one
line on standard error; 130 interrupted; 141 nobody reads the output any more.
"""

from __future__ import annotations

from mkref.cli.main import main

__all__ = ["main"]
