"""Benchmarks: traced and untraced runs of the engine beside plain vLLM. Run with ``python -m benchmarks``."""
