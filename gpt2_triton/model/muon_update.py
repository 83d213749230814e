"""Muon's update of the layers' matrices, one launch per line.  muon.py chooses a rank's matrices,
and kernels/muon.py has the arithmetic.
"""

from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.model_view import ModelView
from gpt2_triton.model.muon import POLAR_EXPRESS
from gpt2_triton.model.tables import HeadActs


def update_matrices(K: Kernels, m: ModelView[object, HeadActs]) -> None:
    """Update the layers' matrices by Muon: write their momentum to x, nearly
    orthogonalise x, and update w with x.
    """
    for c in m.matrices:
        if c.part.x.numel():
            K.muon_momentum(c.part, m.step)
    m.comm.collect_matrices(m.matrices)
    for c in m.matrices:
        if not len(c.owned):
            continue
        K.muon_normalise(c.next, m.a.scratch, c.owned)
        x, y = c.next, c.owned
        # y = p[0] x + (p[1] gram + p[2] gram gram) x with gram = x x^T; the last y is c.owned
        for p in POLAR_EXPRESS:
            K.muon_gram(c.gram, x)
            K.muon_poly(c.poly, c.gram, *p[1:])
            K.muon_apply(y, x, c.poly, p[0])
            x, y = y, x
    m.comm.deliver_matrices(m.matrices)
    for c in m.matrices:
        if c.part.x.numel():  # with many ranks some own no part of a class
            m.observe.muon(c.part)
            K.muon_update(c.part, m.step)
