"""The trainings of the replication of Thinking States, by name; all of them, and the measurements on them, by one command.

python scripts/replicate_thinking_states.py                              everything, in two processes
detspec train --config configs/replication.py:parity-thinking-0          one run, as that command starts it
"""

from replications.thinking_states.runs import get_config

__all__ = ["get_config"]
