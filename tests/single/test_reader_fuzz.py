"""A few examples of tests/soak/fuzz_readers.py."""

from __future__ import annotations

import pytest

from tests.soak.fuzz_readers import READERS, examine


@pytest.mark.parametrize("reader", READERS)
def test_reader_returns_or_raises_a_user_error(reader: str) -> None:
    examine(reader, 10)
