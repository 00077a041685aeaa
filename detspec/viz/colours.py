"""Colours of pictures, and of the marks next to tokens."""

BLUE = "#9dc3f0"
YELLOW = "#ffe08a"
GREEN = "#b9e6a5"
RED = "#f5b0a8"
GREY = "#d3d3d3"
BROWN = "#e0c09a"
TEAL = "#a9ddd3"
PALE_BLUE = "#e6f0fb"
INK = "#222222"
FAINT = "#777777"
HATCH_INK = "#4d7f3c"
RULE = "#e2e2e2"
SAME = "#8ab6dd"  # what two runs have in common; told from the next one without seeing colours, too
CHANGED = "#d55e00"
MARK_COLOURS = {"✓": "#2e8b2e", "✗": "#c62828"}
