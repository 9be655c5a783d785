"""`make chaos`: every kind of fault at every phase and place, and long random runs, on real jobs.

Run ``python -m tests.acceptance.chaos`` from the root of the repository. It starts `fft run` and
controls it as an operator would; all figures come from the traces of the jobs. FFT does not import
it.
"""
