"""Write, follow, judge and report the trace of a run. Importing this package starts nothing."""
