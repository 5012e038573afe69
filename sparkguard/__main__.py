"""python -m sparkguard: the sparkguard command."""

import sys

from sparkguard.cli import main

sys.exit(main())
