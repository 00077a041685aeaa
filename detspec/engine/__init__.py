"""Requests in, completions out: rows are refilled as they finish, segments run on the device."""
