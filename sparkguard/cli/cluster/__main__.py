import sys

from sparkguard.cli.cluster import main

sys.exit(main())
