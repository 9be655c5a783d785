"""Strategies and trainers of other frameworks on FFT's transactions, one module for each framework.

This package imports none of them: ``from fft.integrations.lightning import FFTStrategy``.
"""
