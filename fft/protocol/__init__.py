"""The protocol as pure code: spec, table, guards, effects, participant and invariants."""
