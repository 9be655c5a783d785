"""Who is at fault when rollbacks repeat at one place: checks between ranks, and what they prove.

``plan`` and ``history`` are pure; ``checks`` and ``station`` work in a participant; ``rounds``
speaks for an operator or the supervisor.
"""
