"""``python -m pcldnn``."""
import sys

from pcldnn.communicator import guard_imports

with guard_imports():
    from pcldnn.cli import main

if __name__ == "__main__":
    sys.exit(main())
