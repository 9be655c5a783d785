"""Predict how the protocol scales with the job: the shipped engine over one store with a queue and
costs.

`costs` has the measured costs and the designs; `job` runs participants over the store, one server
that handles requests one after another; `formula` counts in closed form. Pure: virtual time, no
history, no traces. A training job uses none of this.
"""
