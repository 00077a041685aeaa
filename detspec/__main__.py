"""`python -m detspec` is the command `detspec`."""

import sys

from detspec.cli.commands import main

sys.exit(main())
