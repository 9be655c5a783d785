"""Who is at fault when rollbacks repeat at one place: checks between ranks, and what they prove.

``plan`` is pure; ``rounds`` asks the ranks, for an operator or the supervisor; ``show`` prints what
was found. The checks themselves are in ``fft.train.diagnosis``.
"""
