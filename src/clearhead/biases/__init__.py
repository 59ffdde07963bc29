"""Biases of relative positions, for `attend(..., bias=)`: what is added to scores at a distance.

>>> from clearhead import biases
>>> biases.alibi(2, 3)[0]
tensor([[ 0.0000, -0.0625, -0.1250],
        [-0.0625,  0.0000, -0.0625],
        [-0.1250, -0.0625,  0.0000]])
"""

from __future__ import annotations

from clearhead.biases.relative import alibi, slopes, t5_buckets

__all__ = ["alibi", "slopes", "t5_buckets"]
