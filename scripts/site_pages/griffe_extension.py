"""Makes griffe, which reads docstrings for the reference, take comments on fields for their docstrings."""

import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from site_pages.field_comments import comment_of, comments

SHAPE = re.compile(r"^\[[^\]]*\] \w+")  # "[B, D] int32"


class FieldComments(griffe.Extension):
    """Gives each field of a class its comment, where it has no docstring."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Called by griffe for each class of the package."""
        found = comments(Path(cls.filepath))
        for field in cls.attributes.values():
            if field.docstring is None and field.lineno:
                text = SHAPE.sub(r"`\g<0>`", comment_of(found, field.lineno, field.endlineno or field.lineno))
                field.docstring = griffe.Docstring(text, lineno=field.lineno, parent=field) if text else None
