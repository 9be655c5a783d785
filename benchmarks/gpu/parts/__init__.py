"""The trials, a module each, with ``run(pen, setting)``; and what several of them use."""
