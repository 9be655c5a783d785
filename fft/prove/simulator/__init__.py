"""A whole job in one process, under one seed and a virtual clock. Pure."""
