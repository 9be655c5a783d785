"""Durable checkpoints as files: where they lie, what each consists of, which of them can be used.

Without torch. A checkpoint is a directory ``step-N`` with files of every rank and a manifest, which
is written last. What goes into the files is `fft.train.checkpoint`'s.
"""
