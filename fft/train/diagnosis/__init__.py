"""The checks that a rank carries out in a diagnosis."""
