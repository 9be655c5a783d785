"""The version of FFT. It imports nothing, so that every file can name it."""

__version__ = "0.1.0"
