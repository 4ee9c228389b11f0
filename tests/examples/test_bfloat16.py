"""Products of bfloat16 matrices are those of float32, rounded once, and so are their gradients."""

from __future__ import annotations

import subprocess
import sys

from tests.paths import REPOSITORY

PRODUCTS = """
import torch
from examples.collapses.bfloat16 import round_once

emulated = round_once()
assert round_once() is emulated
draws = torch.Generator().manual_seed(0)
left, right, added = (torch.randn(shape, generator=draws).bfloat16() for shape in ((40, 64), (64, 48), (48,)))
exact = left.double() @ right.double()
batches = torch.stack([left, -left]), torch.stack([right, right])


def check(found, exact):
    assert found.dtype is torch.bfloat16
    # Half of the spacing of bfloat16, and what a sum in float32 may add.
    assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()


check(torch.mm(left, right), exact)
check(torch.bmm(*batches), batches[0].double() @ batches[1].double())
check(torch.addmm(added, left, right, beta=2, alpha=0.5), 2 * added.double() + 0.5 * exact)
leaf = left.clone().requires_grad_()
with torch.autocast("cpu", torch.bfloat16):
    product = torch.nn.functional.linear(leaf, right.T)
check(product.detach(), exact)
product.sum().backward()
check(leaf.grad, torch.ones_like(exact) @ right.double().T)
assert torch.equal(torch.mm(left.float(), right.float()).double().round(decimals=3), exact.round(decimals=3))
if emulated:
    assert torch.equal(torch.mm(left, right), torch.mm(left.float(), right.float()).bfloat16())
"""


def test_products_and_gradients_are_rounded_once() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRODUCTS], capture_output=True, text=True, timeout=120, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr
