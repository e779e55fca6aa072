"""Samplers: exact filters, frequencies, and reproducible draws."""

import pytest
import torch
from conftest import close

import fir.flashinfer as fi
from fir.flashinfer import logits_processor as lp


def frequencies(draw, classes, rows=20000):
    tokens = draw(rows)
    assert tokens.dtype == torch.int32 and tokens.shape == (rows,)
    return torch.bincount(tokens.long(), minlength=classes).float() / rows


def test_softmax_and_temperature():
    x = torch.randn(5, 1000)
    close(fi.softmax(x), x.softmax(-1))
    close(fi.softmax(x, 0.5), (x / 0.5).softmax(-1))
    t = torch.rand(5) + 0.5
    close(fi.softmax(x.half(), t), (x.half().float() / t[:, None]).softmax(-1))


@pytest.mark.parametrize("classes", (3, 111))
def test_frequencies(classes):
    logits = torch.randn(1, classes)
    p = logits.softmax(-1)
    many = lambda n: p.expand(n, classes).contiguous()
    kept = p.masked_fill(p < p.topk(2)[0][:, -1:], 0)
    for got, want in (
        (lambda n: fi.sampling_from_probs(many(n)), p),
        (lambda n: fi.sampling_from_logits(logits.expand(n, classes).contiguous()), p),
        (lambda n: fi.top_k_sampling_from_probs(many(n), 2), kept / kept.sum()),
        (lambda n: fi.top_k_sampling_from_probs(many(n), torch.full((n,), 2)), kept / kept.sum()),
        (lambda n: fi.top_p_sampling_from_probs(many(n), 0.6), fi.top_p_renorm_probs(p, 0.6)),
        (lambda n: fi.sampling_from_probs(p, indices=torch.zeros(n, dtype=torch.int32)), p),
    ):
        assert (frequencies(got, classes) - want[0]).abs().max() < 0.02
    m = p.masked_fill(p < 0.3 * p.max(), 0)
    got = frequencies(lambda n: fi.min_p_sampling_from_probs(many(n), 0.3), classes)
    assert (got - (m / m.sum())[0]).abs().max() < 0.02


@pytest.mark.parametrize("order", ("top_k_first", "joint"))
def test_top_k_top_p(order):
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    many = lambda n: p.expand(n, 4).contiguous()
    # Of the three that top-k leaves, 0.7 is reached by two after renormalisation as well as before.
    want = torch.tensor([4.0, 3.0, 0.0, 0.0]) / 7
    for draw in (
        lambda n: fi.top_k_top_p_sampling_from_probs(many(n), 3, 0.69, filter_apply_order=order),
        lambda n: fi.top_k_top_p_sampling_from_logits(many(n).log(), 3, 0.69, filter_apply_order=order),
    ):
        assert (frequencies(draw, 4) - want).abs().max() < 0.02
    with pytest.raises(ValueError, match="filter_apply_order"):
        fi.top_k_top_p_sampling_from_probs(p, 3, 0.5, filter_apply_order="both")


def test_renorm_and_masks():
    x = torch.randn(4, 50)
    p, k, t = x.softmax(-1), torch.tensor([1, 3, 50, 7]), torch.tensor([0.1, 0.5, 1.0, 0.9])
    for r in range(4):
        kept = p[r].masked_fill(p[r] < p[r].topk(int(k[r]))[0][-1], 0)
        close(fi.top_k_renorm_probs(p, k)[r], kept / kept.sum())
        masked = fi.top_k_mask_logits(x, k)[r]
        assert torch.equal(masked > -torch.inf, kept > 0) and torch.equal(masked[kept > 0], x[r][kept > 0])
        s, i = p[r].sort(descending=True)
        n = int((s.cumsum(0) - s < t[r]).sum())
        kept = torch.zeros(50).index_copy(0, i[:n], s[:n])
        close(fi.top_p_renorm_probs(p, t)[r], kept / kept.sum())


def test_draws_are_reproducible(device):
    p = torch.rand(64, 100)
    same = [fi.sampling_from_probs(p, seed=7, offset=o) for o in (0, 0, 1)]
    assert torch.equal(same[0], same[1]) and not torch.equal(same[0], same[2])
    again = []
    for _ in range(2):
        g = torch.Generator(device).manual_seed(3)
        again.append([fi.sampling_from_probs(p, generator=g) for _ in range(2)])
    assert torch.equal(again[0][0], again[1][0]) and torch.equal(again[0][1], again[1][1])
    assert not torch.equal(again[0][0], again[0][1])
    ids = fi.sampling_from_probs(p, indices=torch.arange(64), seed=7, offset=0)
    assert ids.dtype == torch.int64 and torch.equal(ids.int(), same[0])


def test_rows_that_are_no_distribution():
    p = torch.rand(3, 10)
    p[1] = torch.nan
    tokens, valid = fi.sampling_from_probs(p, return_valid=True)
    assert valid.tolist() == [True, False, True] and (tokens >= 0).all() and (tokens < 10).all()
    with pytest.raises(ValueError, match="NaN"):
        fi.sampling_from_probs(p, check_nan=True)


def test_chain_speculative():
    target = torch.rand(200, 3, 8).softmax(-1)
    draft, tokens = target[:, :2].contiguous(), torch.randint(0, 8, (200, 2))
    out, accepted, emitted = fi.chain_speculative_sampling(draft, tokens, target)
    assert torch.equal(out[:, :2], tokens) and (out[:, 2] >= 0).all()
    assert (accepted == 2).all() and (emitted == 2).all()
    hopeless = torch.zeros_like(target)
    hopeless[..., 0] = 1
    out, _, emitted = fi.chain_speculative_sampling(draft, tokens.clamp(min=1), hopeless)
    assert (out[:, 0] == 0).all() and (out[:, 1:] == -1).all() and (emitted == 0).all()


def test_pipelines():
    lp = fi.logits_processor
    x = torch.randn(8, 40)
    pipe = lp.LogitsPipe([lp.Temperature(), lp.Softmax(), lp.TopP(), lp.Sample()])
    got = pipe(x, temperature=0.7, top_p=0.8, seed=5, offset=1)
    want = fi.sampling_from_probs(fi.top_p_renorm_probs(fi.softmax(x, 0.7), 0.8), seed=5, offset=1)
    assert torch.equal(got, want)
    joint = lp.LogitsPipe([lp.TopK(joint_topk_topp=True), lp.TopP(), lp.Sample()], input_type=lp.TensorType.PROBS)
    got = joint(x.softmax(-1), top_k=5, top_p=0.5, seed=5, offset=1)
    assert torch.equal(got, fi.top_k_top_p_sampling_from_probs(x.softmax(-1), 5, 0.5, None, "joint", seed=5, offset=1))
    with pytest.raises(lp.CompileError):
        lp.LogitsPipe([lp.Sample(), lp.TopP()], input_type=lp.TensorType.PROBS)


def test_steps_and_rules_of_ones_own():
    class Double(lp.ParameterizedOp):
        IN = OUT = lp.TensorType.LOGITS

        def __call__(self, tensor, **kwargs):
            return lp.TaggedTensor.logits(tensor.data * self.param("by", kwargs, True))

    class Twice(lp.LogitsProcessor):
        def legalize(self, kind):
            if kind is not lp.TensorType.LOGITS:
                raise lp.LegalizationError("logits alone")
            return [Double(**self.params), Double(**self.params)]

    x, seen = torch.randn(3, 20), []
    rule = lp.FusionRule((Double, Double), lambda w: w[0].default_params == w[1].default_params, lambda w: Double(by=w[0].default_params["by"] ** 2))
    for rules, count in ((None, 3), ([rule], 2)):
        pipe = lp.LogitsPipe([Twice(by=3.0), lp.Softmax()], custom_fusion_rules=rules, custom_validity_checks=[lambda ops: seen.append(len(ops))])
        assert pipe.initial_type is lp.TensorType.LOGITS and len(pipe.ops) == count and seen[-1] == 3
        close(pipe(x), (x * 9).softmax(-1))
    assert len(lp.LogitsPipe([Twice(by=3.0), lp.Softmax()], compile=False, custom_fusion_rules=[rule]).ops) == 3
    never = lp.FusionRule((Double, Double), lambda w: False, lambda w: None, prio=9)
    assert len(lp.compile_pipeline(lp.legalize_processors([Twice(by=2.0)]), [never, rule])) == 1

    def refuse(ops):
        raise lp.CompileError("not this one")

    with pytest.raises(lp.CompileError, match="not this one"):
        lp.LogitsPipe([lp.Softmax()], custom_validity_checks=[refuse])
    with pytest.raises(lp.CompileError, match="takes LOGITS"):
        lp.compile_pipeline([lp.Softmax().legalize(lp.TensorType.LOGITS)[0], Double(by=1.0)])
    with pytest.raises(lp.CompileError, match="empty"):
        lp.Compiler().compile([])
    with pytest.raises(ValueError, match="give input_type"):
        lp.LogitsPipe([lp.TopK()])


DRAWS = {
    "sampling_from_logits": ("logits", {}), "sampling_from_probs": ("probs", {}), "top_p_sampling_from_probs": ("probs", {"top_p": [0.5, 0.9]}),
    "top_k_sampling_from_probs": ("probs", {"top_k": [5, 9]}), "min_p_sampling_from_probs": ("probs", {"min_p": [0.1, 0.5]}),
    "top_k_top_p_sampling_from_logits": ("logits", {"top_k": [5, 9], "top_p": [0.5, 0.9]}), "top_k_top_p_sampling_from_probs": ("probs", {"top_k": [5, 9], "top_p": [0.5, 0.9]}),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_argument_of_a_draw(name, device):
    kind, filters = DRAWS[name]
    draw = getattr(fi.sampling, name)
    logits = torch.randn(40, 30)
    x = logits if kind == "logits" else logits.softmax(-1)
    base = {k: v[0] for k, v in filters.items()}
    same = dict(seed=11, offset=3)
    want = draw(x, **base, **same)
    assert want.dtype == torch.int32 and want.shape == (40,)
    # Seeds and offsets, as numbers or tensors; a generator; what is ignored.
    assert torch.equal(want, draw(x, **base, seed=torch.tensor(11), offset=torch.tensor([3])))
    assert not torch.equal(want, draw(x, **base, seed=12, offset=3)) and not torch.equal(want, draw(x, **base, seed=11, offset=400))
    assert torch.equal(want, draw(x, **base, **same, deterministic=False))
    for _ in range(2):
        a, b = (torch.Generator(device).manual_seed(5) for _ in range(2))
        assert torch.equal(draw(x, **base, generator=a), draw(x, **base, generator=b))
    with pytest.raises(ValueError, match="together"):
        draw(x, **base, seed=1)
    # Rows by index, of either width.
    for dtype in (torch.int32, torch.int64):
        rows = torch.tensor([7, 7, 0, 39], dtype=dtype)
        got = draw(x, **base, indices=rows, **same)
        assert got.dtype == dtype and torch.equal(got, draw(x[rows.long()], **base, **same).to(dtype))
    # Filters: one number, or one of each row; each draw is one that passes.
    probs = logits.softmax(-1)
    for key, values in filters.items():
        for value in (values[1], torch.tensor([values[1]] * 40, dtype=torch.int32 if key == "top_k" else torch.float32)):
            tokens = draw(x, **{**base, key: value}, **same).long()
            mine = probs.gather(1, tokens[:, None])
            rank, before = (probs > mine).sum(-1), torch.where(probs > mine, probs, 0.0).sum(-1)
            number = {**base, key: values[1]}
            assert (rank < number.get("top_k", 30)).all() and (before < number.get("top_p", 1.0) + 1e-5).all()
            assert (mine[:, 0] >= number.get("min_p", 0.0) * probs.amax(-1) - 1e-6).all()
    if "top_k_top_p" in name:
        tokens = draw(x, **base, **same, filter_apply_order="joint").long()
        mine = probs.gather(1, tokens[:, None])
        assert ((probs > mine).sum(-1) < 5).all() and (torch.where(probs > mine, probs, 0.0).sum(-1) < 0.5 + 1e-5).all()
        with pytest.raises(ValueError, match="filter_apply_order"):
            draw(x, **base, filter_apply_order="both")
    # Rows that are none.
    broken = x.clone()
    broken[2, 3] = float("nan")
    with pytest.raises(ValueError, match=f"Input {kind} contains NaN"):
        draw(broken, **base, check_nan=True)
    assert torch.equal(want, draw(x, **base, **same, check_nan=True))
    if kind == "probs":
        tokens, valid = draw(broken, **base, **same, return_valid=True)
        assert valid.dtype == torch.bool and not valid[2] and valid.sum() == 39 and torch.equal(tokens[3:], want[3:])
    half = draw(x.half(), **base, **same)
    assert half.shape == want.shape and (half == want).float().mean() > 0.8
