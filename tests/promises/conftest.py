"""Leaves out the promises about several chips where there is one: `make test-mesh` runs them, as it does `tests/mesh`."""

from tests.mesh.conftest import HAS_DEVICES

collect_ignore = [] if HAS_DEVICES else ["test_chips.py"]
