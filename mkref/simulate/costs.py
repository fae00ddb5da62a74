"""What things cost on a GPU: the one table that the simulator takes its times from.

The values lie in `h200.json` beside this file, with the record that each was taken from or fitted
to (`bench/fit_simulator.py` writes it). Times are ns, bandwidths bytes per ns. Times of the
consumers and the loader are as a traced kernel shows them: `stamp` is what one of its time stamps
costs, and is taken off where there are none. They are of the present kernel; under "older" the file
has what differs in older ones, whose records are predicted too.

What it does not do: scale to another GPU. Its bandwidth can be changed, its SMs stay an H200's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mkref.errors import RequestError

__all__ = ["FILE", "H200", "Costs", "from_dict"]

FILE = Path(__file__).with_name("h200.json")


@dataclass(frozen=True)
class Costs:
    """Times in ns; mappings are by the name of an operation.

    Attributes:
        bandwidth, link: bytes per ns of the memory, and of one SM's way to it.
        latency, jitter: of a copy beyond that; the mean of what chance adds.
        after_land, after_release, after_issue: from what the loader waited for until its next copy.
        next_task: the same at the first copy of a task.
        begin, ready: from a task's end until the next is looked at; from there on, if all is there.
        hop: from a producer's end until others see it, with nothing in flight.
        hop_load: more of it for each byte that is in flight per SM; by producer.
        announced, announced_load: the same where results tell by themselves that they are there.
        find, find_row: experts of one row, and of each further one; without a router `dense`.
        head: from having the inputs until the first stage is taken.
        norm: part of `head` if x must be normed, of one row.
        norm_row, norm_rows: each more row up to four; each further four rows.
        stage, gap, block, tail: taking a stage; between two; between row blocks; after the last.
        tile, tile_l2: a stage's tile and warp on the slow path, activations in shared memory or L2.
        item, item_gap, fresh: a chunk of attention; between two; more where this step's key is.
        no_item: attention without a chunk.
        merge, merge_pass: a unit of MERGE by the consumers, and each trip to L2 for its results;
        merge_chunk: of one trip, each result beyond 64, when all SMs read.
        merge_unit, merge_panel: a unit by the helper, and each of its trips, for 32 or 33 results.
        no_merge: MERGE without a unit.
        embed, sample: those tasks.
        stamp: one time stamp.
        host: a step that the host starts: launch, waiting, the tokens; and a kernel that is cold.
        launch: from the end of a launch until the next one's tasks begin, by how they follow one
            another; "early": from a block's end until the next one's loader begins, before all
            others have ended.
    """

    bandwidth: float
    link: float
    latency: float
    jitter: float
    after_land: float
    after_release: float
    after_issue: float
    next_task: float
    begin: float
    ready: float
    hop: float
    hop_load: Mapping[str, float]
    announced: float
    announced_load: float
    find: float
    find_row: float
    dense: float
    head: Mapping[str, float]
    norm: float
    norm_row: float
    norm_rows: float
    stage: Mapping[str, float]
    gap: Mapping[str, float]
    block: Mapping[str, float]
    tail: Mapping[str, float]
    tile: float
    tile_l2: float
    item: float
    item_gap: float
    fresh: float
    no_item: float
    merge: float
    merge_pass: float
    merge_chunk: float
    merge_unit: float
    merge_panel: float
    no_merge: float
    embed: float
    sample: float
    stamp: float
    host: float
    launch: Mapping[str, float]


def from_dict(data: Mapping[str, Any], older: str = "") -> Costs:
    """The costs in the form of `h200.json`.

    Args:
        data: in that form.
        older: short name of an older kernel that the table has, whose own times are wanted.

    Raises:
        RequestError: a constant is missing, unknown, or none.
    """
    names = {field.name for field in fields(Costs)}
    found = data["constants"]
    if names != found.keys():
        raise RequestError(
            f"costs: constants {sorted(names ^ found.keys())} are missing or unknown; "
            "bench/fit_simulator.py writes them all"
        )
    found = found | data["older"][older] if older else found
    values = {name: entry["value"] for name, entry in found.items()}
    for name, value in values.items():
        for number in value.values() if isinstance(value, dict) else (value,):
            if not number >= 0:
                raise RequestError(f"costs: {name} is {value!r}; give numbers from 0 on")
    return Costs(**values)


H200 = from_dict(json.loads(FILE.read_text(encoding="utf-8")))
"""Of the present kernel on an NVIDIA H200."""
