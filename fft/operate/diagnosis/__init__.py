"""Find the rank at fault when rollbacks repeat at one step: checks between ranks, and their
verdict.

``plan`` is pure; ``rounds`` sends the checks to the ranks, for an operator or the supervisor;
``show`` prints the result. The checks themselves are in ``fft.train.diagnosis``.
"""
