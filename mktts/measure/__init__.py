"""Metrics, the machine, benchmarks, parity, a recogniser."""
