"""The protocol, pure: spec, table, guards, effects, the participant, its guarantees."""
