"""Random numbers for pauses and choices of FFT's own threads.

The `random` module belongs to the user's script: a number that an FFT thread drew from it would
change the numbers that the script draws afterwards.
"""

from __future__ import annotations

import random

CHANCE = random.SystemRandom()
"""A generator without state: it does not affect other draws, and forked processes differ."""
