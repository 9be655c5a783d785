"""Becomes the program in its arguments: what starts children runs scripts of Python."""

import os
import sys

if __name__ == "__main__":
    os.execv(sys.argv[1], sys.argv[1:])
