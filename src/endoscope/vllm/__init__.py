"""Traces on vLLM: the model and its backends in the client process, the engine's parts in the engine process."""
