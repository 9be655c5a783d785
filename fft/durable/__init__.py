"""Durable checkpoints as files: where they are stored, their format, and which can be used.

This package does not import torch. A checkpoint is a directory ``step-N`` with files of every rank
and a manifest, which is written last. `fft.train.checkpoint` defines the contents of the files.
"""
