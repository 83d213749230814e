"""Llama 3's table of rotations: cosines and sines of each position, for kernels/rope.py.

The frequencies are Hugging Face's bit for bit: each operation is rounded to fp32,
in the order of transformers.
"""

import math

import numpy as np

# a wavelength below ORIGINAL / HIGH keeps its frequency; above ORIGINAL / LOW the
# frequency is divided by the factor
ORIGINAL = 8192
LOW = 1.0
HIGH = 4.0


def frequencies(HS: int, theta: float, factor: float) -> np.ndarray:
    """Return the HS/2 frequencies, fp32; with a factor above 1, stretched as in Llama 3.1."""
    one = np.float32(1)
    exponents = np.arange(0, HS, 2).astype(np.float32) / np.float32(HS)
    inverse = one / np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)
    if factor == 1:
        return inverse
    wavelength = np.float32(2 * math.pi) / inverse
    slow = wavelength > np.float32(ORIGINAL / LOW)
    fast = wavelength < np.float32(ORIGINAL / HIGH)
    stretched = np.where(slow, inverse / np.float32(factor), inverse)
    smooth = (np.float32(ORIGINAL) / wavelength - np.float32(LOW)) / np.float32(HIGH - LOW)
    between = (one - smooth) * stretched / np.float32(factor) + smooth * stretched
    return np.where(~fast & ~slow, between, stretched)


def table(positions: int, HS: int, theta: float, factor: float) -> np.ndarray:
    """Return fp32 [positions, HS]: the cosines of an fp32 angle for each
    frequency, then the sines.
    """
    angles = (
        np.arange(positions, dtype=np.float32)[:, None] * frequencies(HS, theta, factor)[None, :]
    )
    exact = angles.astype(np.float64)
    return np.concatenate([np.cos(exact), np.sin(exact)], 1).astype(np.float32)
