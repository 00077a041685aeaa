"""Kernels for CPUs in C: compiled for the processor at hand when they are first needed, called by XLA."""
