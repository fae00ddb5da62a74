"""Traces: what every task of a step did and when, as the kernel itself stamped it.

`events` holds the record, `storage` puts it into files, `summary` adds it up, `perfetto` exports
it. Nothing is imported here. A trace explains a run; how fast the run is must be measured with the
trace switched off, because every stamp costs time.
"""
