"""`python -m detspec.cli`."""

import sys

from detspec.cli.commands import main

sys.exit(main())
