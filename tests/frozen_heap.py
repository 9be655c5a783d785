"""Imported last by the server that tests fork processes from: what it has loaded stays.

No collection in a fork goes through it, which would copy every page; nor does a look at all
objects.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
