"""``python -m pcldnn``."""
import sys

from pcldnn.cli import main

sys.exit(main())
