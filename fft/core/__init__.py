"""The pure core: messages, guards, actions, the participant, invariants. No I/O, clock or torch."""
