"""References in plain torch, f32 throughout, written apart from what they check."""

import math
import os
from pathlib import Path

import pytest
import torch
import varied


DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def pytest_addoption(parser):
    parser.addoption("--every-argument", action="store_true", help="fail if an argument of FlashInfer's API never varies")


def pytest_configure(config):
    config.addinivalue_line("markers", "cpu: of host tensors alone")
    if config.getoption("--every-argument"):
        config.pluginmanager.register(varied.Plugin(), "varied")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    plugin = session.config.pluginmanager.get_plugin("varied")
    if plugin is not None and not hasattr(session.config, "workeroutput") and plugin.failed() and exitstatus == 0:
        session.exitstatus = 1


@pytest.fixture(autouse=True, params=DEVICES)
def device(request):
    """Every test runs once per device: what it makes without saying where is made there."""
    torch.manual_seed(20)
    if request.param == "cpu":
        yield "cpu"
        return
    if request.node.get_closest_marker("cpu"):
        pytest.skip("of host tensors alone")
    torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)


def checkout() -> Path:
    """The repository that these tests are in."""
    return Path(__file__).resolve().parents[4]


def shared(name: str) -> Path:
    """A file or folder of the data that lies beside checkouts; the test is skipped without it."""
    for base in (os.environ.get("FIR_SHARED"), checkout() / "shared", checkout().parent / "shared"):
        if base and (Path(base) / name).exists():
            return Path(base) / name
    pytest.skip(f"no shared/{name} beside this checkout (or FIR_SHARED)")


def attention(q, k, v, sm_scale=None, mask=None, soft_cap=0.0, bias=None, sink=None):
    """One request: q [n, h, d], k [m, kv, d], v [m, kv, e]; mask [n, m] of bool; returns o and base-2 lse."""
    n, h, d = q.shape
    group = h // k.shape[1]
    q, k, v = q.float(), k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    s = torch.einsum("nhd,mhd->hnm", q, k) * (1 / math.sqrt(d) if sm_scale is None else sm_scale)
    if bias is not None:
        s = s + bias
    if soft_cap > 0:
        s = soft_cap * torch.tanh(s / soft_cap)
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf)
    if sink is not None:
        s = torch.cat([s, sink.float()[:, None, None].expand(h, n, 1)], -1)
    lse = torch.logsumexp(s, -1)
    p = torch.where(torch.isinf(lse)[..., None], torch.zeros_like(s), torch.exp(s - lse[..., None]))
    if sink is not None:
        p = p[..., :-1]
    return torch.einsum("hnm,mhd->nhd", p, v), (lse * math.log2(math.e)).T


def visible(n, m, causal=False, window=-1):
    """Which keys a query sees, queries aligned at the end."""
    i, j = torch.arange(n)[:, None] + m - n, torch.arange(m)[None]
    mask = torch.ones(n, m, dtype=torch.bool)
    if causal:
        mask &= j <= i
    if window >= 0:
        mask &= j >= i - window
    return mask


#: Twice what rounding the result costs, for inputs of unit variance; f32 has room for another order of sums.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def close(got, want, dtype=None):
    """Fails with the largest difference."""
    assert got.shape == want.shape, (got.shape, want.shape)
    limit = TOLERANCE[dtype or got.dtype]
    torch.testing.assert_close(got.float(), want.float(), atol=limit, rtol=limit)


class Pages:
    """A random paged cache of requests of these lengths, with hostile ids in slots that nobody may read."""

    def __init__(self, lens, page, kv_heads, dim, dtype, layout="NHD", one=False, spare=3):
        counts = [-(-n // page) for n in lens]
        total = sum(counts)
        self.indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        self.indices = torch.cat([torch.randperm(total + spare)[:total], torch.tensor([2**30])]).to(torch.int32)
        self.last = torch.tensor([(n - 1) % page + 1 if n else 0 for n in lens], dtype=torch.int32)
        self.lens, self.page, self.layout = torch.tensor(lens, dtype=torch.int32), page, layout
        shape = (total + spare, 2, page, kv_heads, dim) if layout == "NHD" else (total + spare, 2, kv_heads, page, dim)
        kv = torch.randn(shape).to(dtype)
        self.cache = kv if one else (kv[:, 0].clone(), kv[:, 1].clone())
        self.kv = kv

    def request(self, r):
        """Keys and values of request r, [len, kv_heads, dim]."""
        ids = self.indices[self.indptr[r] : self.indptr[r + 1]].long()
        kv = self.kv[ids] if self.layout == "NHD" else self.kv[ids].transpose(2, 3)
        return tuple(kv[:, i].reshape(-1, *kv.shape[3:])[: self.lens[r]] for i in (0, 1))
