"""Detspec behind the interfaces of other packages."""
