"""The tests, one module each with ``run(pen, setting)``, and helpers that several of them use."""
