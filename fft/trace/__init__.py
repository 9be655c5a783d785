"""The trace of a run: written, followed, judged and reported. Starts nothing."""
