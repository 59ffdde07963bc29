"""A mask in words and as a picture."""

from __future__ import annotations

from clearhead.masks._mask import Mask


def why(*a):
    raise NotImplementedError


def picture(*a):
    raise NotImplementedError


def summary(mask: Mask) -> str:
    return repr(mask)
