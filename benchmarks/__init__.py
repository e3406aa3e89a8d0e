"""Benchmarks: speed of the engine, and checks of judges, probes and statistics."""
