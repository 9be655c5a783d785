"""FFT's DiLoCo beside torchft's own, on the same data under the same faults, for `make bench`.

``python -m benchmarks.diloco`` from the root of the repository. Nothing of FFT imports it.
"""
