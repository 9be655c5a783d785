"""Notices what a process cannot say of itself: that it hangs, is slow, or died."""
