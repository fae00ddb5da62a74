"""Plans: lists of tasks per SM and the counters between them.

    task        the record of 16 words
    share       how work is divided
    build       from a model's geometry to a plan
    buffers     the memory that tasks work on
    verify      proof that a plan is complete, free of races and of hangs
    interpret   runs a plan in NumPy

What it does not do: compile or launch anything (`mkref.machine`).
"""

from __future__ import annotations

from mkref.plan.balance import Balance, balance
from mkref.plan.buffers import BUFFERS, Buffer, buffer_table
from mkref.plan.build import CHUNK_PAGES, PAGE, ROWS, Counter, KvPool, Plan, build_plan
from mkref.plan.interpret import Interpreter
from mkref.plan.share import share
from mkref.plan.task import FIELDS, NO_COUNTER, WORDS, Flag, Op, Task
from mkref.plan.verify import Report, verify

__all__ = [
    "BUFFERS",
    "CHUNK_PAGES",
    "FIELDS",
    "NO_COUNTER",
    "PAGE",
    "ROWS",
    "WORDS",
    "Balance",
    "Buffer",
    "Counter",
    "Flag",
    "Interpreter",
    "KvPool",
    "Op",
    "Plan",
    "Report",
    "Task",
    "balance",
    "buffer_table",
    "build_plan",
    "share",
    "verify",
]
