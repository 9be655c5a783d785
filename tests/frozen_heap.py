"""A module that the fork server imports last; it freezes the objects that are loaded by then.

Garbage collections in a fork do not visit them, which would copy every page; nor do searches
through all objects.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
