"""Strategies and trainers of other frameworks on FFT's transactions, one module for each framework.

This package imports no framework; import the module that you need, such as
``fft.integrations.lightning``.
"""
