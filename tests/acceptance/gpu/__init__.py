"""The tests that need a machine with a GPU, as one command: ``python -m tests.acceptance.gpu``.

`plan` lists the parts and their time limits, `runner` runs each in its own process, `findings` is
the format of their results, `page` writes the page, and `parts` contains the tests themselves. The
code that runs them needs only Python, so that it works where torch or another package does not.
"""
