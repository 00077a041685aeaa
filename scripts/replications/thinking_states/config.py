"""The trainings of the replication by name, each a config for `detspec train`.

python -m scripts.replications.thinking_states                                          everything, in two processes
detspec train --config scripts/replications/thinking_states/config.py:parity-thinking-0    one run, as that command trains it
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3]))  # the `detspec` command does not search the repository's root

from scripts.replications.thinking_states.runs import get_config

__all__ = ["get_config"]
