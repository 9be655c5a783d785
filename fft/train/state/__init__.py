"""The state of a rank: saved, restored, compared, and sent to a rank that joins."""
