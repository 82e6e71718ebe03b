"""`python -m halfbyte` is the `halfbyte` command. Knows nothing else; the one module here that reaches up to a higher floor."""

import sys

from halfbyte.entrypoints.cli import main

if __name__ == "__main__":
    sys.exit(main())
