"""What only a machine with a GPU can show, by one command there: ``python -m benchmarks.gpu``.

`plan` lists the parts and their time limits, `runner` runs each in a process of its own, `findings`
is how they tell what they found, `page` writes it down; `parts` are the trials themselves. What
runs them needs Python alone, so that it works where torch, or anything else, does not.
"""
