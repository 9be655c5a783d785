"""Detect faults that a process cannot report itself: that it hangs, is slow, or died."""
