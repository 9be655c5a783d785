"""The components of one rank in a job that the rooms above share."""
