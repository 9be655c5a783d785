"""`make bench`: FFT, plain torchft and NVIDIA's in-process restart, side by side on the same work.

Run ``python -m benchmarks.side_by_side`` from the root of the repository. It starts real processes,
injects faults, and computes every figure from the events that they wrote. FFT does not import it.
"""
