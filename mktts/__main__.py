import sys

from mktts.cli import main

sys.exit(main())
