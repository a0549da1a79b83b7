"""Mistakes planted in the text of a kernel, which a test must notice."""

from __future__ import annotations

from collections.abc import Callable


def planted(right: str, wrong: str) -> Callable[[str], str]:
    """What puts a mistake into a text; the text must have what it takes the place of."""

    def change(text: str) -> str:
        assert right in text
        return text.replace(right, wrong)

    return change
