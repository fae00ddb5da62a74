"""Benchmarks and probes that need a GPU; each writes a JSON record with its provenance."""
