"""Every error that mkref raises on purpose, one family.

    MkrefError
    ├── ConfigError       a config.json describes a model that mkref does not run
    ├── CheckpointError   a weight file is missing, damaged or does not fit the config
    ├── PlanError         a plan is malformed, or its tasks and counters contradict each other
    ├── MachineError      a machine (GPU or CPU) cannot build, load or run the kernel
    │   └── HangError     a bounded wait inside the kernel ran out
    ├── RequestError      a request asks for something that the engine does not do
    ├── QueueFullError    so many requests wait already that no other is taken
    └── UnavailableError  the service is going down, or its machine is broken

What it does not do: wrap errors of other libraries. A bug in mkref stays a plain Python error.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "HangError",
    "MachineError",
    "MkrefError",
    "PlanError",
    "QueueFullError",
    "RequestError",
    "UnavailableError",
]


class MkrefError(Exception):
    """Base of the family: one line that names the thing, its value and what would be right."""


class ConfigError(MkrefError):
    """The model described by a config is not one that mkref implements."""


class CheckpointError(MkrefError):
    """A checkpoint is unreadable or does not fit its config."""


class PlanError(MkrefError):
    """A plan cannot be built, read or trusted."""


class RequestError(MkrefError):
    """A request asks for something that the engine does not do."""


class QueueFullError(MkrefError):
    """So many requests wait already that no other is taken."""


class UnavailableError(MkrefError):
    """The service takes no requests: it is going down, or its machine is broken."""


class MachineError(MkrefError):
    """A machine cannot build, load or run the kernel."""


class HangError(MachineError):
    """A bounded wait inside the kernel ran out.

    Args:
        code: which wait gave up (the kernel's own number).
        sm: index of the block that waited.
        task: index of its task in that block's list.
        counter: index of the counter it waited for.
        have: value of the counter when it gave up.
        want: value it waited for.
        detail: the same in words: operation, layer, name of the counter.
    """

    def __init__(
        self,
        *,
        code: int,
        sm: int,
        task: int,
        counter: int,
        have: int,
        want: int,
        detail: str = "",
    ) -> None:
        place = detail or f"wait code {code} on {counter}"
        super().__init__(f"hang: SM {sm}, task {task}: {place}; it has {have}, wants {want}")
        self.code = code
        self.sm = sm
        self.task = task
        self.counter = counter
        self.have = have
        self.want = want
