"""The simulator: how long a step takes and why, without a GPU.

`run.simulate` takes the same plan as the kernel and the run-time situation of a step, and plays
through who waits for whom on every SM and in the memory that they share. `costs` is the table of
times, `situation` the inputs of a step, `switches` what can be chosen; `ladder` runs the rungs of
`mkref.measure.ladder`; `compare` sets two records side by side. Nothing is imported here.
`bench/results/simulator.json` says how far its predictions are from measurements.
"""
