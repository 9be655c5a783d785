"""The state of a rank: kept, put back, compared, and sent to who joins."""
