"""The shelf stays small: every shape on it is programs to compile."""

from tests import shelf


def test_shelf_holds_at_most_twelve_shapes():
    shapes = [value for value in vars(shelf).values() if isinstance(value, shelf.Shape)]
    assert 0 < len(set(shapes)) == len(shapes) <= 12
