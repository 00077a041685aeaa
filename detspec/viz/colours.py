"""Colours of pictures, and of the marks next to tokens."""

BLUE, YELLOW, GREEN, RED, GREY = "#9dc3f0", "#ffe08a", "#b9e6a5", "#f5b0a8", "#d3d3d3"
BROWN, TEAL, PALE_BLUE = "#e0c09a", "#a9ddd3", "#e6f0fb"
INK, FAINT, HATCH_INK, RULE = "#222222", "#777777", "#4d7f3c", "#e2e2e2"
MARK_COLOURS = {"✓": "#2e8b2e", "✗": "#c62828"}
