"""`make bench`: FFT, plain torchft and NVIDIA's in-process restart, side by side on the same work.

``python -m benchmarks.side_by_side`` from the root of the repository. Starts real processes, breaks
them, and reads every figure from the events that they wrote. Nothing of FFT imports it.
"""
