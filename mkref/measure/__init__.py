"""How long a step takes, and how many bytes it streams.

    decode    time per step of any batch and context, as the engine runs it
    ladder    the same task code as one launch per operation, as graphs, as one kernel
    rungs     plans of the ladder, made from the real one
    launches  machines that run a step as several launches
    pages     page tables and a random KV cache
    bytes     bytes of a step, counted from the experts that were hit
    bandwidth what the memory can do
    driver    the few calls of the CUDA driver that CuPy does not offer
    record    provenance, statistics, JSON

What it does not do: judge. Records of the project's own runs lie in `bench/results/`.
"""
