"""Real runs and comparisons, recorded and drawn: `import detspec as ds; ds.traces.run_trace(...)`.

Names are looked up when they are used, so that nothing here is imported with the package.
"""

import importlib
from typing import TYPE_CHECKING

from detspec.viz.figures import matplotlib_needed

__all__ = ["acceptance_figure", "comparison_figure", "find_rollback", "measure_acceptance", "run_thought_trace", "run_trace"]
__all__ += ["save_thoughts", "save_trace", "thought_figure", "trace_figure"]

if TYPE_CHECKING:
    from detspec.traces.acceptance import measure_acceptance
    from detspec.traces.draw_acceptance import acceptance_figure
    from detspec.traces.draw_comparison import comparison_figure
    from detspec.traces.draw_thoughts import save_thoughts, thought_figure
    from detspec.traces.draw_windows import save_trace, trace_figure
    from detspec.traces.record_thoughts import run_thought_trace
    from detspec.traces.record_windows import find_rollback, run_trace
else:
    FILES = {
        "acceptance_figure": "draw_acceptance",
        "comparison_figure": "draw_comparison",
        "find_rollback": "record_windows",
        "measure_acceptance": "acceptance",
        "run_thought_trace": "record_thoughts",
        "run_trace": "record_windows",
        "save_thoughts": "draw_thoughts",
        "save_trace": "draw_windows",
        "thought_figure": "draw_thoughts",
        "trace_figure": "draw_windows",
    }

    def __getattr__(name: str) -> object:
        """The function called `name`; `InputError` if it draws and matplotlib is missing."""
        if name not in FILES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with matplotlib_needed():
            return getattr(importlib.import_module(f"{__name__}.{FILES[name]}"), name)

    def __dir__() -> list[str]:
        return __all__
