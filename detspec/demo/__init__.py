"""The whole product in one picture: batches that change ordinary generation and leave deterministic generation as it is."""
