"""A script that becomes the program in its arguments, for launchers that run only Python
scripts."""

import os
import sys

if __name__ == "__main__":
    os.execv(sys.argv[1], sys.argv[1:])
