"""Traces: what every task of a step did and when, as the kernel itself stamped it.

`events` holds the record, `stages` the ring's part of it, `record` takes both from a machine,
`storage` puts them into files, `summary` and `ring` add them up, `path` finds what the step's time
hung on, `perfetto` exports. Nothing is imported here. A trace explains a run; how fast the run is
must be measured with the trace switched off, because every stamp costs time.
"""
