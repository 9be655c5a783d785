"""Random numbers for pauses and choices of FFT's own threads.

Those of the `random` module are the script's: one that a thread draws between two of the script's
gives it other ones than an undisturbed run has.
"""

from __future__ import annotations

import random

CHANCE = random.SystemRandom()
"""Without a state: draws nothing from others, and is another one in a process that is forked."""
