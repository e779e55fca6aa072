"""Wrappers in CUDA graphs: captured once, planned anew, replayed. On host tensors the same steps run one by one."""

import warnings

import pytest
import torch
from conftest import attention, visible

import fir.flashinfer as fi

BF16, I32 = torch.bfloat16, torch.int32
HEADS, KV_HEADS, DIM, PAGE, POOL = 8, 2, 128, 16, 64


class Step:
    """A wrapper of three requests with buffers, and its plan for any lengths."""

    def __init__(self, q_len):
        self.q_len = q_len
        buffers = [torch.zeros(n, dtype=I32) for n in (4, POOL, 3)]
        self.cache = torch.randn(POOL, 2, PAGE, KV_HEADS, DIM).to(BF16)
        workspace = torch.empty(1, dtype=torch.uint8)
        if q_len is None:
            self.wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", True, False, *buffers)
        else:
            self.wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(
                workspace, "NHD", True, torch.zeros(4, dtype=I32), *buffers)
        self.rows = q_len or 1
        self.q = torch.randn(3 * self.rows, HEADS, DIM).to(BF16)
        self.out = torch.empty_like(self.q)

    def plan(self, lens):
        """Lengths, in pages chosen anew."""
        pages = [-(-n // PAGE) for n in lens]
        self.lens, self.ids = lens, torch.randperm(POOL, device="cpu")[: sum(pages)].to(I32)
        indptr = torch.tensor([0, pages[0], sum(pages[:2]), sum(pages)], dtype=I32, device="cpu")
        last = torch.tensor([(n - 1) % PAGE + 1 for n in lens], dtype=I32, device="cpu")
        table = (indptr, self.ids.to(self.q.device), last, HEADS, KV_HEADS, DIM, PAGE)
        if self.q_len is None:
            self.wrapper.plan(*table, q_data_type=BF16, kv_data_type=BF16)
        else:
            qo = torch.arange(0, 3 * self.rows + 1, self.rows, dtype=I32, device="cpu")
            self.wrapper.plan(qo, *table, causal=True, q_data_type=BF16, kv_data_type=BF16)
        self.indptr = indptr.tolist()

    def run(self):
        self.wrapper.run(self.q, self.cache, out=self.out)

    def check(self):
        for r, n in enumerate(self.lens):
            ids = self.ids[self.indptr[r] : self.indptr[r + 1]].long().to(self.q.device)
            k, v = (self.cache[ids, i].reshape(-1, KV_HEADS, DIM)[:n] for i in (0, 1))
            rows = slice(r * self.rows, (r + 1) * self.rows)
            want = attention(self.q[rows], k, v, mask=visible(self.rows, n, True))[0]
            torch.testing.assert_close(self.out[rows].float(), want, atol=2e-2, rtol=2e-2)


def recorded(device, function):
    """What does again what ``function`` does: a graph, or the function."""
    if device == "cpu":
        return function
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def follow(device, step, replay, side, *batches):
    """Plans one batch after another, on a stream of its own or not, and replays: each time what was planned is computed."""
    stream = torch.cuda.Stream() if side and device == "cuda" else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches:
            step.q.copy_(torch.randn_like(step.q))
            for out in (step.out, getattr(step, "lse", step.out)):
                out.fill_(float("nan"))
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    step.plan(*batch)
                    replay()
                torch.cuda.current_stream().wait_stream(stream)
            else:
                step.plan(*batch)
                replay()
            step.check()


@pytest.mark.parametrize("q_len", [None, 1, 4])
@pytest.mark.parametrize("side", [False, True])
def test_a_captured_run_follows_the_plan(device, q_len, side):
    step = Step(q_len)
    step.plan([40, 5, 300])
    replay = recorded(device, step.run)
    follow(device, step, replay, side, ([40, 5, 300],), ([16, 17, 512],), ([700, 64, 4],), ([200, 201, 202],), ([4, 4, 4],))


def test_a_batch_of_other_launches_warns(device):
    """Requests of one query token, then some of many: another kernel, which the graph does not have."""
    if device == "cpu":
        pytest.skip("nothing is captured")
    step = Step(1)
    step.plan([40, 5, 300])
    recorded(device, step.run)
    step.q_len = step.rows = 100
    with pytest.warns(RuntimeWarning, match="capture"):
        step.plan([140, 105, 300])
    step.q = torch.randn(300, HEADS, DIM).to(BF16)
    step.out = torch.empty_like(step.q)
    replay = recorded(device, step.run)
    step.plan([100, 305, 120])
    replay()
    step.check()


def sums(lens):
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=I32, device="cpu")


@pytest.mark.parametrize("masked", [False, True])
def test_a_captured_ragged_run_follows_the_plan(device, masked):
    buffers = [torch.zeros(4, dtype=I32), torch.zeros(4, dtype=I32), torch.zeros(4000, dtype=torch.uint8), torch.zeros(4, dtype=I32)]
    wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1, dtype=torch.uint8), "NHD", True, *buffers)
    q, k, v = torch.randn(60, HEADS, DIM).to(BF16), torch.randn(600, KV_HEADS, DIM).to(BF16), torch.randn(600, KV_HEADS, DIM).to(BF16)
    out, masks = torch.empty_like(q), []

    def plan(qo, kv):
        masks[:] = [torch.rand(a, b) < 0.6 for a, b in zip(qo, kv)]
        flat = torch.cat([m.flatten() for m in masks]) if masked else None
        wrapper.plan(sums(qo), sums(kv), HEADS, KV_HEADS, DIM, custom_mask=flat, causal=True, q_data_type=BF16, kv_data_type=BF16)

    # Of all rows that are captured; later batches have as many or fewer.
    plan([20, 20, 20], [200, 200, 200])
    replay = recorded(device, lambda: wrapper.run(q, k, v, out=out))
    for qo, kv in (([20, 20, 20], [200, 200, 200]), ([20, 30, 10], [20, 300, 64]), ([17, 18, 19], [400, 18, 100])):
        if device == "cpu" and (sum(qo), sum(kv)) != (60, 600):
            continue  # What runs one by one has the rows of its tensors.
        q.copy_(torch.randn_like(q)), out.fill_(float("nan"))
        plan(qo, kv)
        replay()
        ends, starts = sums(qo).tolist(), sums(kv).tolist()
        for r in range(3):
            rows, at = slice(ends[r], ends[r + 1]), slice(starts[r], starts[r + 1])
            seen = masks[r] if masked else visible(qo[r], kv[r], True)
            torch.testing.assert_close(out[rows].float(), attention(q[rows], k[at], v[at], mask=seen)[0], atol=2e-2, rtol=2e-2)
    with pytest.raises(ValueError, match="batch size is fixed"):
        wrapper.plan(sums([1]), sums([1]), HEADS, KV_HEADS, DIM)
    if device == "cuda":
        with pytest.raises(ValueError, match="as were captured"):
            plan([20, 21, 20], [200, 200, 200])


def test_captured_masks_are_those_of_the_plan(device):
    """A mask of a paged batch lies in the buffers of the constructor, which captured runs read."""
    buffers = [torch.zeros(n, dtype=I32) for n in (3, 3, POOL, 2)]
    bits = [torch.zeros(2000, dtype=torch.uint8), torch.zeros(3, dtype=I32)]
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1, dtype=torch.uint8), "NHD", True, *buffers, *bits)
    cache, q = torch.randn(POOL, 2, PAGE, KV_HEADS, DIM).to(BF16), torch.randn(8, HEADS, DIM).to(BF16)
    out, now = torch.empty_like(q), {}

    def plan(lens):
        pages = [-(-n // PAGE) for n in lens]
        now.update(lens=lens, ids=torch.randperm(POOL, device="cpu")[: sum(pages)].to(I32), masks=[torch.rand(4, n) < 0.6 for n in lens], indptr=sums(pages))
        last = torch.tensor([(n - 1) % PAGE + 1 for n in lens], dtype=I32, device="cpu")
        wrapper.plan(sums([4, 4]), now["indptr"], now["ids"].to(q.device), last, HEADS, KV_HEADS, DIM, PAGE, custom_mask=torch.cat([m.flatten() for m in now["masks"]]),
                     q_data_type=BF16, kv_data_type=BF16)

    plan([30, 5])
    replay = recorded(device, lambda: wrapper.run(q, cache, out=out))
    for lens in ([30, 5], [100, 200], [7, 300]):
        q.copy_(torch.randn_like(q)), out.fill_(float("nan"))
        plan(lens)
        replay()
        ends = now["indptr"].tolist()
        for r, n in enumerate(lens):
            ids = now["ids"][ends[r] : ends[r + 1]].long().to(q.device)
            k, v = (cache[ids, i].reshape(-1, KV_HEADS, DIM)[:n] for i in (0, 1))
            rows = slice(4 * r, 4 * r + 4)
            torch.testing.assert_close(out[rows].float(), attention(q[rows], k, v, mask=now["masks"][r])[0], atol=2e-2, rtol=2e-2)
    for given, match in ((bits[:1], "mask_indptr_buf should"), ((), "custom_mask_buf should"), ((torch.zeros(3, dtype=torch.uint8), bits[1]), "expected at most 3")):
        wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1, dtype=torch.uint8), "NHD", True, *buffers, *given)
        with pytest.raises(ValueError, match=match):
            plan([30, 5])


class Latent:
    """A wrapper of latent attention of three requests with buffers, and its plan for any lengths."""

    def __init__(self, heads, rows, causal):
        self.heads, self.rows, self.causal = heads, rows, causal
        self.cache = torch.randn(POOL, PAGE, 576).to(BF16)
        buffers = [torch.zeros(n, dtype=I32) for n in (4, 4, POOL, 3)]
        self.wrapper = fi.BatchMLAPagedAttentionWrapper(torch.empty(1, dtype=torch.uint8), True, *buffers)
        self.q = torch.randn(3 * rows, heads, 576).to(BF16)
        self.out, self.lse = torch.empty(3 * rows, heads, 512, dtype=BF16), torch.empty(3 * rows, heads)

    def plan(self, lens):
        pages = [-(-n // PAGE) for n in lens]
        self.lens, self.ids = lens, torch.randperm(POOL, device="cpu")[: sum(pages)].to(I32)
        host = lambda values: torch.tensor(values, dtype=I32, device="cpu")
        self.indptr = [0, pages[0], sum(pages[:2]), sum(pages)]
        self.wrapper.plan(host([i * self.rows for i in range(4)]), host(self.indptr), self.ids.to(self.q.device), host(lens),
                          self.heads, 512, 64, PAGE, self.causal, 0.1, BF16, BF16)

    def run(self):
        self.wrapper.run(self.q[..., :512], self.q[..., 512:], self.cache[..., :512], self.cache[..., 512:], out=self.out,
                         lse=self.lse, return_lse=True)

    def check(self):
        for r, n in enumerate(self.lens):
            ids = self.ids[self.indptr[r] : self.indptr[r + 1]].long().to(self.q.device)
            k = self.cache[ids].reshape(-1, 1, 576)[:n]
            rows = slice(r * self.rows, (r + 1) * self.rows)
            want, lse = attention(self.q[rows], k, k[..., :512], 0.1, visible(self.rows, n, self.causal))
            torch.testing.assert_close(self.out[rows].float(), want, atol=4e-2, rtol=4e-2)
            torch.testing.assert_close(self.lse[rows], lse, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("heads,rows,causal", [(128, 1, False), (16, 1, False), (16, 1, True), (128, 2, True), (16, 5, True), (3, 1, False)])
@pytest.mark.parametrize("side", [False, True])
def test_captured_latent_attention_follows_the_plan(device, heads, rows, causal, side):
    step = Latent(heads, rows, causal)
    # Nothing is cut at first, and nothing merged: later it is.
    step.plan([5, 5, 5])
    replay = recorded(device, step.run)
    follow(device, step, replay, side, ([5, 5, 5],), ([16, 17, 512],), ([700, 64, 5],), ([200, 201, 202],), ([6, 6, 6],))


def test_latent_plans_of_engines_stay_in_graphs(device):
    """SGLang plans by ``_cached_module.plan`` with lengths that it has on the host, and ignores what it returns."""
    step = Latent(16, 1, False)
    step.plan([5, 5, 5])
    replay, wrapper = recorded(device, step.run), step.wrapper
    for lens in ([300, 17, 64], [40, 500, 2]):
        pages = [-(-n // PAGE) for n in lens]
        step.lens, step.indptr = lens, [0, pages[0], sum(pages[:2]), sum(pages)]
        step.ids = torch.randperm(POOL, device="cpu")[: sum(pages)].to(I32)
        wrapper._kv_indices_buf[: len(step.ids)].copy_(step.ids)
        host = lambda values: torch.tensor(values, dtype=I32, device="cpu")
        wrapper._kv_indptr_buf.copy_(host(step.indptr)), wrapper._kv_len_arr_buf.copy_(host(lens))
        wrapper._cached_module.plan(wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer,
                                    host([0, 1, 2, 3]), host(step.indptr), host(lens), 16, 512, False)
        step.out.fill_(float("nan")), step.lse.fill_(float("nan"))
        replay()
        step.check()


@pytest.mark.parametrize("rotated", [64, 32])
def test_captured_runs_of_the_older_latent_wrapper_follow_the_plan(device, rotated):
    heads, width = 16, 512 + rotated
    pool = torch.randn(POOL, PAGE, width).to(BF16)
    buffers = [torch.zeros(n, dtype=I32) for n in (4, POOL, 3)]
    wrapper = fi.decode.BatchDecodeMlaWithPagedKVCacheWrapper(torch.empty(1, dtype=torch.uint8), True, False, *buffers)
    q, out, now = torch.randn(3, heads, width).to(BF16), torch.empty(3, heads, 512, dtype=BF16), {}

    def plan(lens):
        pages = [-(-n // PAGE) for n in lens]
        now.update(lens=lens, ids=torch.randperm(POOL, device="cpu")[: sum(pages)].to(I32), indptr=sums(pages))
        last = torch.tensor([(n - 1) % PAGE + 1 for n in lens], dtype=I32, device="cpu")
        wrapper.plan(now["indptr"], now["ids"].to(q.device), last, heads, 512, PAGE, 0.1, data_type=BF16)

    plan([5, 5, 5])
    replay = recorded(device, lambda: wrapper.run(q[..., :512], q[..., 512:], pool[..., :512], pool[..., 512:], out=out))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for lens in ([5, 5, 5], [16, 17, 512], [700, 64, 5]):
            q.copy_(torch.randn_like(q)), out.fill_(float("nan"))
            plan(lens)
            replay()
            ends = now["indptr"].tolist()
            for r, n in enumerate(lens):
                k = pool[now["ids"][ends[r] : ends[r + 1]].long().to(q.device)].reshape(-1, 1, width)[:n]
                want = attention(q[r : r + 1], k, k[..., :512], 0.1)[0]
                torch.testing.assert_close(out[r : r + 1].float(), want, atol=4e-2, rtol=4e-2)
    for lens, match in (([5, 5], "indptr is 3, expected 4"), ([POOL * PAGE + 1, 5, 5], "expected at most")):
        with pytest.raises(ValueError, match=match):
            pages = [-(-n // PAGE) for n in lens]
            wrapper.plan(sums(pages), torch.zeros(sum(pages), dtype=I32), torch.ones(len(lens), dtype=I32), heads, 512, PAGE, 0.1, data_type=BF16)
    with pytest.raises(ValueError, match="paged_kv_indices_buffer should"):
        fi.decode.BatchDecodeMlaWithPagedKVCacheWrapper(torch.empty(1), True, False, buffers[0], None, buffers[2])


class Cascade:
    """Three requests of ``rows`` query tokens each, of which the first two share a prefix and the last has one alone."""

    GROUPS = ((0, 0, 1), (0, 1, 2))

    def __init__(self, rows):
        self.rows = rows
        arrays = [[torch.zeros(n, dtype=I32) for n in sizes] for sizes in ((3, 4), (3, 4), (POOL, POOL), (2, 3))]
        self.wrapper = fi.MultiLevelCascadeAttentionWrapper(2, torch.empty(1, dtype=torch.uint8), "NHD", True, *arrays)
        self.cache = torch.randn(POOL, 2, PAGE, KV_HEADS, DIM).to(BF16)
        self.q = torch.randn(3 * rows, HEADS, DIM).to(BF16)

    def plan(self, prefixes, own):
        free, host = torch.randperm(POOL, device="cpu").to(I32).tolist(), lambda x: torch.tensor(x, dtype=I32, device="cpu")
        self.levels, arrays = [], [[], [], [], []]
        for lens, requests in ((prefixes, (2, 1)), (own, (1, 1, 1))):
            ids = [[free.pop() for _ in range(-(-n // PAGE))] for n in lens]
            self.levels.append((lens, ids))
            arrays[0].append(sums([self.rows * n for n in requests])), arrays[1].append(sums([len(i) for i in ids]))
            arrays[2].append(host(sum(ids, [])).to(self.q.device)), arrays[3].append(host([(n - 1) % PAGE + 1 for n in lens]))
        self.wrapper.plan(*arrays, HEADS, KV_HEADS, DIM, PAGE, causal=True, q_data_type=BF16)

    def run(self):
        self.out = self.wrapper.run(self.q, self.cache)

    def check(self):
        for r in range(3):
            parts = [[], []]
            for (lens, ids), group in zip(self.levels, self.GROUPS):
                at = torch.tensor(ids[group[r]], device=self.q.device).long()
                for i in (0, 1):
                    parts[i].append(self.cache[at, i].reshape(-1, KV_HEADS, DIM)[: lens[group[r]]])
            (k, v), rows = map(torch.cat, parts), slice(r * self.rows, (r + 1) * self.rows)
            want = attention(self.q[rows], k, v, mask=visible(self.rows, len(k), True))[0]
            torch.testing.assert_close(self.out[rows].float(), want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("rows", [1, 4, 40])
@pytest.mark.parametrize("side", [False, True])
def test_a_captured_cascade_follows_the_plan(device, rows, side):
    step = Cascade(rows)
    step.plan([16, 16], [40, 40, 40])
    step.run()
    replay = recorded(device, step.run)
    follow(device, step, replay, side, ([16, 16], [40, 40, 40]), ([320, 160], [41, 57, 170]), ([48, 500], [40, 44, 70]), ([32, 16], [200, 40, 60]))


def test_a_cascade_of_other_launches_warns(device):
    if device == "cpu":
        pytest.skip("nothing is captured")
    step = Cascade(1)
    step.plan([16, 16], [40, 40, 40])
    recorded(device, step.run)
    step.rows, step.q = 40, torch.randn(120, HEADS, DIM).to(BF16)
    with pytest.warns(RuntimeWarning, match="capture"):
        step.plan([16, 16], [40, 40, 40])
    step.run()
    step.check()


def test_buffers_of_a_cascade_are_checked():
    with pytest.raises(ValueError, match="qo_indptr_buf_arr should have a tensor for each of 2 levels"):
        fi.MultiLevelCascadeAttentionWrapper(2, torch.empty(1, dtype=torch.uint8), "NHD", True)
    step = Cascade(1)
    step.wrapper._buffers[2][1] = torch.zeros(2, dtype=I32)
    with pytest.raises(ValueError, match=r"paged_kv_indices_buf_arr\[1\] is 9, expected at most"):
        step.plan([16, 16], [40, 40, 40])


def test_latent_buffers_are_checked():
    buffers = [torch.zeros(n, dtype=I32) for n in (4, 4, 8, 3)]
    for missing in range(4):
        given = [None if i == missing else b for i, b in enumerate(buffers)]
        with pytest.raises(ValueError, match="should be a torch.Tensor"):
            fi.BatchMLAPagedAttentionWrapper(torch.empty(1), True, *given)
    wrapper = fi.BatchMLAPagedAttentionWrapper(torch.empty(1), True, *buffers)
    rest = (4, 512, 64, PAGE, False, 0.1, BF16, BF16)
    for sizes, match in (((4, 4, 9, 3), "kv_indices is 9"), ((3, 3, 4, 2), "qo_indptr is 3"), ((4, 4, 4, 2), "kv_len_arr is 2")):
        with pytest.raises(ValueError, match=match):
            wrapper.plan(*(torch.zeros(n, dtype=I32) for n in sizes), *rest)
