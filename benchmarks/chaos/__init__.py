"""`make chaos`: every kind of fault at every phase and place, and long random runs, on real jobs.

``python -m benchmarks.chaos`` from the root of the repository. Starts `fft run` and speaks to it as
an operator would; all figures are read from the traces of the jobs. Nothing of FFT imports it.
"""
