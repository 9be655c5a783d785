"""One attempt at a step, from its begin to its vote, commit or rollback."""
