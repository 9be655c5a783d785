"""The interface for training scripts. Only this package of FFT imports torch."""

from fft.util.versions import check

check()
