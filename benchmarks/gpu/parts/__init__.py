"""The tests, a module each, with ``run(pen, setting)``, and the helpers that several of them
use."""
