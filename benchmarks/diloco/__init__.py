"""FFT's DiLoCo beside torchft's own, on the same data under the same faults, for `make bench`.

Run ``python -m benchmarks.diloco`` from the root of the repository. FFT does not import it.
"""
