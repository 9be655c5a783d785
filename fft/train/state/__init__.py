"""The state of a rank: save and restore it, compare it, and send it to a rank that joins."""
