"""The polynomials of Muon, which kernels/muon.py applies."""

# Each row (a, b, c) is p(s) = a s + b s^3 + c s^5 of the singular values s.  The rows are those of Polar Express (Amsel
# et al. 2025, https://arxiv.org/abs/2505.16932): each one is the odd quintic nearest to 1 on the interval into which
# the rows before it bring all s between LOWEST and 1, and so the five together are the best five.  All but the last
# take s / 1.01: rounding to bf16 may lift a singular value above its interval, where the next polynomial grows.
# tests/model/test_muon.py derives them again.
LOWEST = 1e-3 / 1.02 / 1.01  # what 1e-3 of the norm is after the division by 1.02 norms and by 1.01
POLAR_EXPRESS = (
    (8.20615719576407, -22.90471716679143, 16.462724596901133),
    (4.067930319748221, -2.861538944815634, 0.5183433066308626),
    (3.915337344362215, -2.824678668750206, 0.5247598413274771),
    (3.305347928536547, -2.429741964928751, 0.4868975867879092),
    (2.31826076950585, -1.6846590469245175, 0.4205115823539365),
)
