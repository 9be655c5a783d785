"""The checks that a rank carries out when it is asked who is at fault."""
