"""`python -m detspec.cli`."""

import sys

from detspec.cli.main import main

sys.exit(main())
