"""The palette of the page: OKLCH with lightness that is monotone in the weight."""

from __future__ import annotations

import numpy as np

__all__ = ["colours"]


def colours(dark: bool = False, steps: int = 256) -> np.ndarray:
    """Return the colours from weight 0 to the largest, (step, 3), each channel from 0 to 1."""
    t = np.linspace(0, 1, steps)
    if dark:
        light, hue = 0.24 + 0.7 * t, 285 - 185 * t
        chroma = 0.035 + 0.12 * np.sin(np.pi * np.minimum(1, t * 0.92 + 0.06))
    else:
        light, hue = 0.99 - 0.69 * t, 100 + 175 * t
        chroma = 0.002 + 0.13 * np.sin(np.pi * np.minimum(1, t * 0.85 + 0.02))
    a, b = (chroma * wave(np.deg2rad(hue)) for wave in (np.cos, np.sin))
    # OKLab to linear sRGB (Ottosson 2020).
    cubes = np.array([
        [1, 0.3963377774, 0.2158037573],
        [1, -0.1055613458, -0.0638541728],
        [1, -0.0894841775, -1.291485548],
    ]) @ np.stack([light, a, b])  # fmt: skip
    linear = np.array([
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.707614701],
    ]) @ cubes**3  # fmt: skip
    linear = np.clip(linear, 0, 1)
    curved = 1.055 * linear ** (1 / 2.4) - 0.055
    return np.where(linear <= 0.0031308, 12.92 * linear, curved).T
