"""How the protocol grows with the job: the shipped core over one store with a queue and prices.

`costs` says what things cost and which design is asked; `store` is the store, one server that
does one thing after another; `job` runs participants over it; `formula` counts in closed form.
Pure: virtual time, no history, no traces. Nothing of this is used by a training job.
"""
