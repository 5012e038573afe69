"""python -m sparkguard.cli.cluster: spark-serve where no script of that name is installed."""

import sys

from sparkguard.cli.cluster import main

sys.exit(main())
