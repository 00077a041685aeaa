"""Attention over a paged cache: every implementation under the one contract."""

from tests.ops.attention_contract import AttentionContract


class TestReference(AttentionContract):
    implementation = "reference"
