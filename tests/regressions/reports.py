"""Public bug reports about PyTorch on out-of-tree devices, each as a small test.

Every snippet uses `dev` (a torch.device), `F`, `BACKEND` (a torch.compile backend name) and carries its
own asserts; all of them pass on the CPU. `run=False` marks reports that need more than one machine.
"""

# ruff: noqa
E = []


def e(group, urls, what, code, expect, run=True):
    E.append(
        dict(
            group=group,
            urls=urls if isinstance(urls, list) else [urls],
            what=what,
            code=code.strip("\n"),
            expect=expect,
            run=run,
        )
    )


# A. Views, aliasing, in-place

e(
    "A. Views, aliasing, in-place",
    ["https://github.com/pytorch/xla/issues/3392"],
    "Rebinding `t.data` to a fresh tensor also changed older views of `t`.",
    """
t = torch.zeros(10, device=dev); v = t.view(2, 5)
t.data = t.data + 1
assert v.sum().item() == 0 and t.sum().item() == 10
w = t.view(2, 5); t.data.add_(1)
assert w.sum().item() == 20
""",
    "rebind leaves old view alone; in-place on `.data` is seen by the view",
)

e(
    "A. Views, aliasing, in-place",
    ["https://github.com/pytorch/xla/issues/3330", "https://github.com/pytorch/xla/issues/3502"],
    "`t.data = smaller_slice` crashed while a view of `t` was alive (broke FSDP).",
    """
t = torch.zeros(10, device=dev); v = t.view(-1)
t.data = v[:5] + 1
assert t.shape == (5,) and v.shape == (10,) and v.sum().item() == 0
""",
    "no error; shapes independent",
)

e(
    "A. Views, aliasing, in-place",
    ["https://github.com/pytorch/xla/issues/2964"],
    "`as_strided` through the fallback was a copy, so writes were lost.",
    """
t = torch.ones(4, device=dev); s = t.as_strided((2,), (2,))
s[0] = -1
assert t.tolist() == [-1, 1, 1, 1]
""",
    "write goes through to the base; a view op must never silently fall back",
)

e(
    "A. Views, aliasing, in-place",
    ["https://github.com/pytorch/xla/issues/7859"],
    "`as_strided`/`unsqueeze` on an offset slice ignored the storage offset.",
    """
a = torch.arange(5, device=dev)[2:]
assert a.as_strided((2,), (1,)).tolist() == [2, 3]
assert a.as_strided((4,), (1,), 0).tolist() == [0, 1, 2, 3]
assert a.unsqueeze(0).tolist() == [[2, 3, 4]]
""",
    "reads the storage, not the visible slice",
)

e(
    "A. Views, aliasing, in-place",
    ["https://github.com/pytorch/xla/issues/1718"],
    "Gradient reported wrong after an in-place slice write on an activation (a maintainer suspected `norm()`; test both).",
    """
w = torch.arange(6., device=dev).view(2, 3).requires_grad_()
y = torch.ones(1, 2, device=dev) @ w
y[:, :2] = 0
y.sum().backward()
assert w.grad.tolist() == [[0, 0, 1], [0, 0, 1]]
""",
    "zero gradient for overwritten columns (CopySlices path)",
)

e(
    "A. Views, aliasing, in-place",
    ["https://github.com/pytorch/xla/issues/8499"],
    "Cached 0-d scalar constants were corrupted by in-place updates / buffer donation.",
    """
a = torch.tensor(42, device=dev); a.add_(1); assert a.item() == 43
b = torch.tensor(42, device=dev); assert b.item() == 42
b.add_(1); assert b.item() == 43 and a.item() == 43
""",
    "constants in any cache are immutable and never donated",
)

e(
    "A. Views, aliasing, in-place",
    ["https://github.com/pytorch/pytorch/issues/118115"],
    "In-place `addcdiv_` wrong when self is transposed (all optimizers affected).",
    """
x = torch.arange(6., device=dev).view(2, 3).t(); y = torch.ones(3, 2, device=dev)
r = x.clone().addcdiv(y, y + 1); x.addcdiv_(y, y + 1)
assert torch.equal(x.cpu(), r.cpu()) and not x.is_contiguous()
""",
    "same as out-of-place; strides kept; also addcmul_/lerp_",
)

e(
    "A. Views, aliasing, in-place",
    ["https://github.com/pytorch/pytorch/pull/165267"],
    "Random in-place fills silently skipped non-contiguous tensors.",
    """
b = torch.zeros(4, 4, device=dev); b.t()[::2].uniform_(1, 2)
assert (b[:, ::2] >= 1).all().item() and (b[:, 1::2] == 0).all().item()
""",
    "fills exactly the viewed elements; also normal_/bernoulli_/exponential_/random_",
)

e(
    "A. Views, aliasing, in-place",
    ["https://github.com/pytorch/pytorch/issues/180984"],
    "conv2d on a channel slice of a channels_last tensor read the wrong elements.",
    """
s = torch.arange(16., device=dev).view(1, 2, 2, 4).contiguous(memory_format=torch.channels_last)[:, :1]
w = torch.full((1, 1, 1, 1), 2., device=dev)
assert torch.equal(F.conv2d(s, w), F.conv2d(s.contiguous(), w))
""",
    "same as on `.contiguous()`; P#174345 reports the same for BatchNorm2d/avg_pool2d with storage_offset > 0",
)

e(
    "A. Views, aliasing, in-place",
    ["https://github.com/pytorch/xla/issues/6861"],
    "`module.to(device)` made new Parameters, so lists captured earlier (optimizers) went stale.",
    """
m = torch.nn.Linear(2, 2); ps = list(m.parameters()); m.to(dev)
assert all(a is b for a, b in zip(ps, m.parameters()))
""",
    "Parameter identity kept, as on CUDA; if PrivateUse1 cannot, document it and pin it with a test",
)


# B. dtype and type promotion

e(
    "B. dtype and type promotion",
    ["https://github.com/pytorch/xla/issues/863"],
    "`prod`/`cumprod` of int8 stayed int8 and overflowed.",
    """
a = torch.tensor([100, 100], dtype=torch.int8, device=dev)
assert a.prod().dtype == torch.int64 and a.prod().item() == 10000
assert a.cumprod(0).tolist() == [100, 10000] and a.sum().item() == 200
""",
    "small integer reductions accumulate in int64",
)

e(
    "B. dtype and type promotion",
    ["https://github.com/pytorch/xla/pull/2746"],
    "`div(int16, rounding_mode='trunc')` gave -0.0 float.",
    """
a = torch.tensor([-47, 7, -7], dtype=torch.int16, device=dev)
b = torch.tensor([47, 2, 2], dtype=torch.int16, device=dev)
t = torch.div(a, b, rounding_mode='trunc'); f = torch.div(a, b, rounding_mode='floor')
assert t.dtype == torch.int16 and t.tolist() == [-1, 3, -3] and f.tolist() == [-1, 3, -4]
""",
    "integer dtype and both roundings exact (X#2946: no hidden f64)",
)

e(
    "B. dtype and type promotion",
    ["https://github.com/pytorch/xla/issues/1929"],
    "bf16 activation `*= 0.5` failed at backward (mixed precision disallowed).",
    """
m = torch.nn.Linear(5, 3).to(dev, torch.bfloat16)
x = torch.rand(4, 5, device=dev, dtype=torch.bfloat16, requires_grad=True)
h = m(x); h *= 0.5; h.sum().backward()
assert h.dtype == x.grad.dtype == m.weight.grad.dtype == torch.bfloat16
""",
    "Python floats are weak; everything stays bf16 (X#3718: no f32 round trip)",
)

e(
    "B. dtype and type promotion",
    ["https://github.com/pytorch/xla/issues/3551"],
    "addcmul/addcdiv did not promote float32 with float64/complex128.",
    """
a = torch.ones(2, device=dev); b = torch.ones(2, device=dev, dtype=torch.float64)
assert torch.addcmul(a, b, b).dtype == torch.float64
assert torch.addcdiv(a, b, b + 1).tolist() == [1.5, 1.5]
""",
    "result_type of the three operands",
)

e(
    "B. dtype and type promotion",
    ["https://github.com/pytorch/xla/pull/385"],
    "`cat` with legacy empty 1-D tensors and a negative dim failed.",
    """
n = torch.tensor([], device=dev); b = torch.ones(2, 2, device=dev)
assert torch.cat([n, b, n], -1).shape == (2, 2)
""",
    "shape-(0,) operands are skipped",
)

e(
    "B. dtype and type promotion",
    ["https://github.com/pytorch/xla/issues/3717"],
    "Float-only unary ops on int tensors raised a compiler error.",
    """
a = torch.tensor([3], device=dev)
for f in (torch.tan, torch.exp, torch.sqrt, torch.sigmoid, torch.erf, torch.rsqrt):
    assert f(a).dtype == torch.float32
""",
    "int -> default float dtype",
)

e(
    "B. dtype and type promotion",
    ["https://github.com/pytorch/xla/issues/869"],
    "`sign`/`abs` on uint8 unsupported or wrong.",
    """
a = torch.tensor([0, 1, 200], dtype=torch.uint8, device=dev)
assert a.sign().tolist() == [0, 1, 1] and a.abs().tolist() == [0, 1, 200]
""",
    "unsigned semantics (StableHLO has no abs on ui8)",
)

e(
    "B. dtype and type promotion",
    ["https://github.com/pytorch/xla/issues/592"],
    "Indexing a uint8 tensor returned float32.",
    """
a = torch.arange(10, device=dev).to(torch.uint8)
assert a[torch.tensor([0, 3], device=dev)].dtype == torch.uint8
""",
    "dtype kept",
)

e(
    "B. dtype and type promotion",
    ["https://github.com/pytorch/pytorch/issues/179845"],
    "int32 + bf16 'loses' integers above 256: a rule to keep, not to 'fix'.",
    """
r = torch.tensor([257], dtype=torch.int32, device=dev) + torch.zeros(1, dtype=torch.bfloat16, device=dev)
assert r.dtype == torch.bfloat16 and r.item() == 256
""",
    "identical to CPU",
)

e(
    "B. dtype and type promotion",
    ["https://github.com/pytorch/pytorch/issues/197715"],
    "Device -> CPU copy into float64/complex128 silently wrote nothing.",
    """
x = torch.arange(1, 5, dtype=torch.float32, device=dev) / 4
assert x.to('cpu', torch.float64).tolist() == [.25, .5, .75, 1.]
d = torch.full((4,), 7., dtype=torch.complex128); d.copy_(x); assert d[3].item() == 1
""",
    "converted values; if a dtype is unsupported raise, never leave memory untouched",
)


# C. Indexing, scatter, sort

e(
    "C. Indexing, scatter, sort",
    ["https://github.com/pytorch/xla/issues/609"],
    "`x[True] = v` left x unchanged.",
    """
x = torch.zeros(2, 3, device=dev); x[True] = torch.ones(1, 1, 2, 3, device=dev)
assert x.sum().item() == 6
x[False] = 5; assert x.sum().item() == 6
""",
    "0-d bool mask semantics",
)

e(
    "C. Indexing, scatter, sort",
    ["https://github.com/pytorch/pytorch/issues/158413"],
    "index_put with `[mask, None]` wrote along the wrong axis (mask routed to masked_fill; core bug, since fixed, easy to repeat).",
    """
x = torch.tensor([[1, 2], [3, 4]], device=dev); m = torch.tensor([True, False], device=dev)
r = torch.ops.aten.index_put(x, [m, None], torch.tensor(0, device=dev))
assert r.tolist() == [[0, 0], [3, 4]], r
""",
    "row 0 zeroed",
)

e(
    "C. Indexing, scatter, sort",
    ["https://github.com/pytorch/xla/pull/4438"],
    "masked_scatter confused mask/source broadcasting.",
    """
m = torch.tensor([[True, False], [True, True]], device=dev)
r = torch.zeros(2, 2, device=dev).masked_scatter(m, torch.arange(1., 6., device=dev))
assert r.tolist() == [[1, 0], [2, 3]]
""",
    "source consumed in order",
)

e(
    "C. Indexing, scatter, sort",
    ["https://github.com/pytorch/xla/issues/880"],
    "gather/index_select on zero-size dims raised 'slice size out of range'; strides off.",
    """
a = torch.empty(0, 1, 2, 0, device=dev); i = torch.empty(0, 1, 2, 0, dtype=torch.int64, device=dev)
assert a.gather(0, i).shape == a.shape
assert a.index_select(0, torch.tensor([], dtype=torch.int64, device=dev)).shape == a.shape
assert torch.empty(0, 3, device=dev).stride() == torch.empty(0, 3).stride()
""",
    "empty results, CPU strides",
)

e(
    "C. Indexing, scatter, sort",
    ["https://github.com/pytorch/xla/issues/4552"],
    "cross_entropy with target -1 returned a number.",
    """
try: F.cross_entropy(torch.ones(3, 5, device=dev), torch.tensor([-1, -1, 3], device=dev)).cpu(); raised = False
except (IndexError, RuntimeError): raised = True
assert raised
""",
    "policy: as for index_select",
)

e(
    "C. Indexing, scatter, sort",
    ["https://github.com/pytorch/pytorch/issues/195074"],
    "Accumulating scatter into a bool view with an odd offset hit neighbours.",
    """
b = torch.zeros(8, dtype=torch.bool, device=dev); v = b.narrow(0, 3, 4)
v.index_put_((torch.tensor([0, 2], device=dev),), torch.ones(2, dtype=torch.bool, device=dev), accumulate=True)
assert b.nonzero().flatten().tolist() == [3, 5]
""",
    "only elements 3 and 5; also scatter_add_/index_add_, with duplicate ids",
)

e(
    "C. Indexing, scatter, sort",
    ["https://github.com/pytorch/xla/pull/2419"],
    "argmax/argmin tie-breaking and NaN differed.",
    """
t = torch.ones(3, 3, device=dev); assert t.argmax().item() == 0
t[2, 2] = float('nan'); assert t.argmax().item() == 8 and t.argmin().item() == 8
""",
    "first index on ties; NaN wins",
)

e(
    "C. Indexing, scatter, sort",
    ["https://github.com/intel/torch-xpu-ops/issues/4839"],
    "topk on a NaN row returned index -1.",
    """
x = torch.randn(64, 32, device=dev); x[0] = float('nan')
v, i = x.topk(4, sorted=False)
assert ((i >= 0) & (i < 32)).all().item() and v[0].isnan().all().item()
s = torch.tensor([1., float('nan'), 3.], device=dev)
assert s.topk(1).indices.item() == 1 and s.sort().indices.tolist() == [0, 2, 1]
""",
    "valid indices; NaN sorts as largest (also bf16, and largest=False)",
)


# D. NaN, empty and 0-d edges

e(
    "D. NaN, empty and 0-d edges",
    ["https://github.com/pytorch/xla/pull/2330"],
    "clamp returned `min` for NaN input.",
    """
n = torch.tensor([float('nan'), 5.], device=dev).clamp(0, 1)
assert n[0].isnan().item() and n[1].item() == 1
""",
    "NaN propagates (stablehlo.clamp does not)",
)

e(
    "D. NaN, empty and 0-d edges",
    ["https://github.com/pytorch/xla/issues/511"],
    "`clamp(max=c)` also clamped below at the smallest normal.",
    """
a = torch.tensor([-2., 5.], device=dev); assert a.clamp(max=3.4).tolist()[0] == -2
""",
    "no lower bound invented",
)

e(
    "D. NaN, empty and 0-d edges",
    [
        "https://github.com/pytorch/pytorch/issues/137406",
        "https://github.com/pytorch/pytorch/issues/187399",
    ],
    "Matmul family crashed on size-0 dims.",
    """
assert (torch.empty(0, 9, device=dev) @ torch.ones(9, device=dev)).shape == (0,)
r = torch.baddbmm(torch.ones(2, 3, 1, device=dev), torch.empty(2, 3, 0, device=dev), torch.empty(2, 0, 1, device=dev))
assert r.sum().item() == 6
""",
    "empty result, or beta*input when K == 0",
)

e(
    "D. NaN, empty and 0-d edges",
    ["https://github.com/pytorch/pytorch/issues/191694"],
    "nanmedian aborted the process for rank-5 input.",
    """
x = torch.arange(24., device=dev).reshape(2, 1, 3, 2, 2)
assert x.nanmedian(dim=0).values.shape == (1, 3, 2, 2)
""",
    "any rank; at worst a Python exception",
)

e(
    "D. NaN, empty and 0-d edges",
    ["https://github.com/pytorch/xla/issues/3061"],
    "Ops with dim=0 on 0-d tensors raised.",
    """
z = torch.rand((), device=dev)
assert torch.log_softmax(z, 0).item() == 0 and z.cumsum(0).shape == () and z.max(0).indices.item() == 0
""",
    "0-d behaves as 1-element 1-D",
)


# E. nn ops, losses, attention

e(
    "E. nn ops, losses, attention",
    ["https://github.com/pytorch/xla/pull/2583"],
    "max_pool2d ceil_mode made an extra row of -inf.",
    """
r = F.max_pool2d(torch.randn(1, 1, 8, 10, device=dev), 3, 4, ceil_mode=True)
assert r.shape == (1, 1, 2, 3) and r.isfinite().all().item()
assert F.max_pool2d(torch.ones(1, 1, 5, 6, device=dev), 1, 2, ceil_mode=True).shape == (1, 1, 3, 3)
""",
    "last window must start inside the (left-padded) input",
)

e(
    "E. nn ops, losses, attention",
    ["https://github.com/pytorch/xla/issues/8897"],
    "bilinear upsample by scale_factor 1.5, align_corners=False differed.",
    """
a = torch.arange(9., device=dev).view(1, 1, 3, 3)
r = F.interpolate(a, scale_factor=1.5, mode='bilinear', align_corners=False)
assert torch.allclose(r[0, 0, 0].cpu(), torch.tensor([0., .5, 7 / 6, 11 / 6]), atol=1e-4)
""",
    "the given scale (not out/in) drives the source index unless recompute_scale_factor=True",
)

e(
    "E. nn ops, losses, attention",
    ["https://github.com/pytorch/xla/issues/2333"],
    "Gradient penalty (double backward) through a stride-2 conv crashed.",
    """
x = torch.rand(1, 2, 8, 8, device=dev, dtype=torch.float64, requires_grad=True)
w = torch.rand(3, 2, 3, 3, device=dev, dtype=torch.float64, requires_grad=True)
f = lambda a, b: F.conv2d(a, b, stride=2, padding=1)
assert torch.autograd.gradgradcheck(f, (x, w), fast_mode=True)
""",
    "gradgradcheck passes; covers conv_transpose output_padding",
)

e(
    "E. nn ops, losses, attention",
    ["https://github.com/pytorch/xla/issues/911"],
    "Double backward of grouped Conv1d segfaulted.",
    """
m = torch.nn.Conv1d(4, 6, 3, groups=2).to(dev); x = torch.rand(2, 4, 6, device=dev, requires_grad=True)
y = m(x); g = torch.autograd.grad(y, [x, *m.parameters()], y, create_graph=True)
gg = torch.autograd.grad(sum(t.sum() for t in g), [x, *m.parameters()], allow_unused=True)
assert gg[0].shape == x.shape
""",
    "finite grads equal to CPU",
)

e(
    "E. nn ops, losses, attention",
    ["https://github.com/pytorch/xla/issues/922"],
    "PixelShuffle and RReLU lost their gradient.",
    """
for m, s in ((torch.nn.PixelShuffle(3), (1, 9, 4, 4)), (torch.nn.RReLU(), (1, 2, 2))):
    x = torch.rand(s, device=dev, requires_grad=True); m(x).sum().backward(); assert (x.grad == 1).all().item()
""",
    "gradient 1 for positive input",
)

e(
    "E. nn ops, losses, attention",
    ["https://github.com/pytorch/xla/issues/2215"],
    "EmbeddingBag(sum) backward failed: bag_size output undefined.",
    """
m = torch.nn.EmbeddingBag(10, 3, mode='sum').to(dev)
m(torch.tensor([1, 5, 9], device=dev), torch.tensor([0], device=dev)).sum().backward()
assert m.weight.grad.sum().item() == 9
""",
    "all four outputs defined",
)

e(
    "E. nn ops, losses, attention",
    ["https://github.com/pytorch/pytorch/issues/28716"],
    "padding_idx row got a gradient for long inputs.",
    """
m = torch.nn.Embedding(10, 4, padding_idx=0).to(dev)
m(torch.zeros(1, 1000, dtype=torch.int64, device=dev)).sum().backward()
assert m.weight.grad[0].abs().sum().item() == 0
""",
    "zero",
)

e(
    "E. nn ops, losses, attention",
    ["https://github.com/pytorch/xla/issues/3141"],
    "All-ignored nll_loss and its backward.",
    """
x = torch.randn(5, 2, device=dev, requires_grad=True)
l = F.nll_loss(F.log_softmax(x, 1), torch.ones(5, dtype=torch.int64, device=dev), ignore_index=1); l.backward()
assert l.isnan().item() and (x.grad == 0).all().item()
""",
    "loss NaN, grad exactly 0",
)

e(
    "E. nn ops, losses, attention",
    ["https://github.com/pytorch/xla/pull/2991"],
    "inf/NaN in a non-target logit leaked into nll_loss (one-hot times logits).",
    """
p = torch.tensor([[0.5, float('-inf')], [float('nan'), 0.25]], device=dev)
assert F.nll_loss(p, torch.tensor([0, 1], device=dev), reduction='none').tolist() == [-.5, -.25]
""",
    "select/gather, do not multiply",
)

e(
    "E. nn ops, losses, attention",
    ["https://github.com/pytorch/xla/issues/3361"],
    "Could not backprop through BatchNorm in eval().",
    """
m = torch.nn.BatchNorm2d(3).to(dev).eval(); x = torch.rand(2, 3, 4, 4, device=dev, requires_grad=True)
m(x).sum().backward(); assert abs(x.grad.mean().item() - 1) < 1e-3
""",
    "gradient = weight / sqrt(running_var + eps)",
)

e(
    "E. nn ops, losses, attention",
    ["https://github.com/pytorch/xla/issues/220", "https://github.com/pytorch/xla/pull/806"],
    "BatchNorm ignored momentum, so eval accuracy collapsed.",
    """
m = torch.nn.BatchNorm1d(1, momentum=0.1).to(dev); m(torch.tensor([[1.], [3.]], device=dev))
assert abs(m.running_mean.item() - .2) < 1e-6 and abs(m.running_var.item() - 1.1) < 1e-6
assert m.num_batches_tracked.item() == 1
""",
    "EMA with unbiased variance; also momentum=None",
)

e(
    "E. nn ops, losses, attention",
    ["https://github.com/pytorch/pytorch/issues/103963"],
    "SDPA with a bool mask whose row is all False.",
    """
q = torch.rand(1, 1, 2, 4, device=dev); m = torch.tensor([[True, False], [False, False]], device=dev)
r = F.scaled_dot_product_attention(q, q, q, m)
assert r.isfinite().all().item() and (r[0, 0, 1] == 0).all().item()
""",
    "zeros for a fully masked row on current CPU PyTorch; grads finite too",
)

e(
    "E. nn ops, losses, attention",
    ["https://github.com/intel/torch-xpu-ops/issues/5090"],
    "SDPA enable_gqa=True + per-head mask failed to compile.",
    """
q = torch.randn(2, 8, 4, 16, device=dev); k = torch.randn(2, 2, 4, 16, device=dev)
m = torch.randn(2, 8, 4, 4, device=dev)
r = F.scaled_dot_product_attention(q, k, k, m, enable_gqa=True)
kk = k.repeat_interleave(4, 1); c = F.scaled_dot_product_attention(q, kk, kk, m)
assert torch.allclose(r, c, atol=1e-5)
""",
    "same as expanding kv heads",
)

e(
    "E. nn ops, losses, attention",
    ["https://github.com/pytorch/xla/issues/3070"],
    "abs/real/conj of complex: fallback or no autograd.",
    """
z = torch.tensor([3 + 4j], device=dev, requires_grad=True); z.abs().sum().backward()
assert abs(z.grad.item() - (0.6 + 0.8j)) < 1e-6
y = torch.fft.fft(torch.ones(4, device=dev)); assert y.real.tolist() == [4, 0, 0, 0] and y.conj().imag.abs().sum().item() == 0
""",
    "grad z/|z|; lazy conj/neg bits resolved before leaving the device",
)

e(
    "E. nn ops, losses, attention",
    ["https://github.com/pytorch/xla/issues/9707"],
    "inverse() of a non-square matrix failed only when read, with a compiler message.",
    """
try: torch.inverse(torch.randn(2, 3, device=dev)); raised = False
except RuntimeError: raised = True
assert raised
""",
    "raises at the call, in every eager mode",
)


# F. Randomness

e(
    "F. Randomness",
    ["https://github.com/pytorch/xla/pull/4690"],
    "Checkpoint recompute drew a new dropout mask (preserve_rng_state ignored).",
    """
from torch.utils.checkpoint import checkpoint
x = torch.ones(1000, device=dev, requires_grad=True)
y = checkpoint(lambda a: F.dropout(a * 1.0, .5), x, use_reentrant=False); y.sum().backward()
assert torch.equal((y != 0), (x.grad != 0))
""",
    "mask of forward and recompute equal (PR pytorch#194478: failed silently on MPS)",
)

e(
    "F. Randomness",
    ["https://github.com/pytorch/xla/issues/2532"],
    "No device Generator; torch.manual_seed did not cover the device.",
    """
torch.manual_seed(7); a = torch.rand(4, device=dev); torch.manual_seed(7); b = torch.rand(4, device=dev)
g = torch.Generator(device=dev).manual_seed(1); c = torch.rand(4, device=dev, generator=g)
s = g.get_state(); d = torch.rand(4, device=dev, generator=g); g.set_state(s)
assert torch.equal(a, b) and not torch.equal(c, d) and torch.equal(d, torch.rand(4, device=dev, generator=g))
""",
    "seedable, save/restorable generator per device",
)

e(
    "F. Randomness",
    ["https://github.com/pytorch/xla/issues/562"],
    "randperm(device) crashed.",
    """
for n in (0, 1, 257):
    assert torch.randperm(n, device=dev).sort().values.tolist() == list(range(n))
""",
    "valid permutation for n = 0, 1, 257",
)


# G. Copy, serialisation, data loading

e(
    "G. Copy, serialisation, data loading",
    ["https://github.com/pytorch/xla/issues/1026", "https://github.com/pytorch/xla/issues/2858"],
    "Checkpoint saved on the device could not be loaded where the plugin is absent.",
    """
import io
b = io.BytesIO(); torch.save(torch.nn.Linear(2, 2).to(dev).state_dict(), b); b.seek(0)
s = torch.load(b, map_location='cpu', weights_only=True); assert s['weight'].device.type == 'cpu'
""",
    "file holds plain storages tagged `tpu:0`; loads in a process that never imports the backend; with no map_location returns to the device",
)

e(
    "G. Copy, serialisation, data loading",
    [
        "https://github.com/pytorch/pytorch/issues/108978",
        "https://github.com/pytorch/pytorch/issues/86975",
    ],
    "Cross-device assignment into an indexed slice wrote at the wrong place.",
    """
r = torch.zeros(2, 2, 3)
for i in range(2): r[i][1] = torch.full((3,), i + 1., device=dev)
assert r[:, 1].tolist() == [[1] * 3, [2] * 3] and r[:, 0].sum() == 0
a = torch.zeros(3, 2, device=dev); a[1:, 1] = torch.tensor([-1., -2.])
assert a.tolist() == [[0, 0], [0, -1], [0, -2]]
""",
    "offset and strides of the target respected, both directions",
)

e(
    "G. Copy, serialisation, data loading",
    ["https://github.com/pytorch/pytorch/issues/189690"],
    "non_blocking host->device copy read the source after it was freed.",
    """
o = []
for i in range(50):
    h = torch.full((257,), float(i)); o.append(h.to(dev, non_blocking=True)); h.fill_(-1); del h
assert [int(t[0]) for t in o] == list(range(50)) or dev.type == 'cpu'
""",
    "values intact: source kept alive or staged by the runtime (ImmutableOnlyDuringCall for pageable memory); on CUDA a pageable source may be reused after return, match that",
)

e(
    "G. Copy, serialisation, data loading",
    ["https://github.com/pytorch/pytorch/pull/86056"],
    "Tensor made from a non-contiguous NumPy array arrived scrambled.",
    """
import numpy as np
a = np.arange(9.).reshape(3, 3)[:, :2]
assert torch.tensor(a, device=dev).tolist() == a.tolist() and torch.from_numpy(a).to(dev).tolist() == a.tolist()
""",
    "logical order kept",
)


# H. Backend plumbing and CPU fallback

e(
    "H. Backend plumbing and CPU fallback",
    ["https://github.com/pytorch/pytorch/issues/102081"],
    "Boxed CPU fallback did not move `Tensor?[]` arguments (index / index_put).",
    """
x = torch.arange(6., device=dev).view(2, 3); i = torch.tensor([0, 1], device=dev)
assert x[i, None].shape == (2, 1, 3) and x[:, i].shape == (2, 2)
""",
    "force these ops through the fallback in a test; None entries survive",
)

e(
    "H. Backend plumbing and CPU fallback",
    ["https://github.com/pytorch/pytorch/issues/104965"],
    "Fallback dropped mutations of TensorList arguments (`_foreach_add_`).",
    """
ts = [torch.zeros(2, device=dev), torch.zeros(3, device=dev)]; torch._foreach_add_(ts, 1.)
assert [t.sum().item() for t in ts] == [2, 3]
""",
    "written back to the originals, in place",
)

e(
    "H. Backend plumbing and CPU fallback",
    ["https://github.com/pytorch/pytorch/issues/119358"],
    "GradScaler refused non-CUDA devices.",
    """
p = torch.nn.Parameter(torch.ones(1, device=dev)); o = torch.optim.SGD([p], .1)
s = torch.amp.GradScaler(dev.type, init_scale=8.)
s.scale(p * float('inf')).backward(); s.step(o); s.update()
assert p.item() == 1 and s.get_scale() == 4
""",
    "inf step skipped, scale halved (needs _amp_foreach_non_finite_check_and_unscale_, _amp_update_scale_)",
)

e(
    "H. Backend plumbing and CPU fallback",
    ["https://github.com/pytorch/xla/issues/2884", "https://github.com/pytorch/xla/issues/2321"],
    "clip_grad_norm_ needed patching; inf norm broken; hidden host sync.",
    """
p = torch.nn.Parameter(torch.zeros(2, device=dev)); p.grad = torch.tensor([3., 4.], device=dev)
n = torch.nn.utils.clip_grad_norm_([p], 1.0); assert abs(n.item() - 5) < 1e-5 and abs(p.grad.norm().item() - 1) < 1e-4
assert torch.nn.utils.clip_grad_norm_([p], 9., norm_type=float('inf')).item() <= 1
""",
    "right for 2 and inf; no device->host read inside",
)

e(
    "H. Backend plumbing and CPU fallback",
    ["https://github.com/pytorch/xla/issues/3811"],
    "linear's backward did not reference the weight, so tampering between fwd and bwd went unseen.",
    """
l = torch.nn.Linear(3, 3).to(dev); x = torch.ones(1, 3, device=dev, requires_grad=True); y = l(x).sum()
with torch.no_grad(): l.weight.add_(1)
try: y.backward(); raised = False
except RuntimeError as ex: raised = 'inplace' in str(ex)
assert raised
""",
    "version-counter error as on CPU",
)

e(
    "H. Backend plumbing and CPU fallback",
    ["https://github.com/pytorch/xla/pull/9548", "https://github.com/pytorch/xla/pull/9549"],
    "Shape/argument errors surfaced as C++ check failures.",
    """
a, b = torch.ones(1, 1, device=dev), torch.ones(9, 4, device=dev)
for f in (lambda: torch.cat([a, b]), lambda: torch.div(a, b, rounding_mode='bad'), lambda: b @ b):
    try: f(); raised = False
    except RuntimeError as ex: raised = 'Check failed' not in str(ex)
    assert raised
""",
    "same exception type and (nearly) same text as CPU, raised at the call",
)


# I. torch.compile, caching, memory

e(
    "I. torch.compile, caching, memory",
    ["https://github.com/pytorch/xla/pull/5309", "https://github.com/pytorch/xla/pull/4992"],
    "In-place update of a captured buffer/attribute or an input was lost or crashed under compile.",
    """
class M(torch.nn.Module):
    def __init__(self): super().__init__(); self.register_buffer('b', torch.zeros(3, 2))
    def forward(self, i, v): self.b.index_copy_(0, i, v); return self.b.sum()
m = M().to(dev); c = torch.compile(m, backend=BACKEND)
assert c(torch.tensor([1], device=dev), torch.ones(1, 2, device=dev)).item() == 2 and m.b[1].tolist() == [1, 1]
""",
    "buffer mutated exactly once per call, also on the first (compiling) call",
)

e(
    "I. torch.compile, caching, memory",
    ["https://github.com/pytorch/xla/issues/5430"],
    "Output that is a view of an input must alias it and stay mutable.",
    """
f = torch.compile(lambda x: x.view(-1), backend=BACKEND)
x = torch.ones(2, 2, device=dev, requires_grad=True).clone(); o = f(x); o.mul_(2)
assert x.sum().item() == 8
""",
    "aliasing preserved (view replayed outside the graph)",
)

e(
    "I. torch.compile, caching, memory",
    ["https://github.com/pytorch/pytorch/issues/195422"],
    "Mutation through dropout's identity return was lost when compiled.",
    """
def f(x): y = F.dropout(x, .5, False); y += y; return y
x = torch.ones(2, device=dev); f(x); assert x.tolist() == [2, 2]
# compiled run on the tpu backend must also give [2, 2]
""",
    "eager and compiled agree",
)

e(
    "I. torch.compile, caching, memory",
    ["https://github.com/pytorch/xla/pull/7676", "https://github.com/pytorch/xla/issues/7614"],
    "dynamic=True: second shape errored or recompiled Dynamo code.",
    """
f = torch.compile(lambda a, b: (a + b).sum(0), backend=BACKEND, dynamic=True)
for n in (4, 5, 6): assert f(torch.ones(3, n, device=dev), torch.ones(n, device=dev)).tolist() == [6.] * n
""",
    "right values; Dynamo traces once, one executable per shape bucket, counters assert it",
)

e(
    "I. torch.compile, caching, memory",
    ["https://github.com/huggingface/transformers/issues/31126"],
    "Static KV-cache update by index recompiled for every generated token.",
    """
k = torch.zeros(1, 2, 16, 4, device=dev)
for t in range(5): k.index_copy_(2, torch.tensor([t], device=dev), torch.full((1, 2, 1, 4), float(t + 1), device=dev))
assert k[0, 0, :6, 0].tolist() == [1, 2, 3, 4, 5, 0]
""",
    "also `k[:, :, pos] = v`; 1 compile for all positions",
)

e(
    "I. torch.compile, caching, memory",
    [
        "https://github.com/pytorch/pytorch/issues/122969",
        "https://github.com/tenstorrent/tt-xla/issues/1940",
    ],
    "Compiled models / executable cache kept device tensors alive (OOM between tests).",
    """
import gc, weakref
m = torch.nn.Linear(4, 4).to(dev); c = torch.compile(m, backend=BACKEND); c(torch.ones(1, 4, device=dev))
w = weakref.ref(m.weight); del m, c; torch._dynamo.reset(); gc.collect(); assert w() is None
""",
    "no tensor owned by a cached executable; live-buffer count returns to the baseline; cache bounded by entries/bytes",
)


# J. Distributed and ecosystem

e(
    "J. Distributed and ecosystem",
    ["https://github.com/huggingface/accelerate/issues/480"],
    "Gradient accumulation on XLA did not match a large batch.",
    """
torch.manual_seed(0); m = torch.nn.Linear(3, 1).to(dev); x = torch.randn(8, 3, device=dev)
m(x).mean().backward(); g = m.weight.grad.clone(); m.zero_grad()
for c in x.chunk(4): (m(c).mean() / 4).backward()
assert torch.allclose(g, m.weight.grad, atol=1e-6)
""",
    "equal; in-place `.grad` accumulation across step boundaries",
)

e(
    "J. Distributed and ecosystem",
    ["https://github.com/Lightning-AI/pytorch-lightning/issues/18172"],
    "'bf16-mixed' silently meant bf16-true.",
    """
m = torch.nn.Linear(2, 2).to(dev)
with torch.autocast(dev.type, dtype=torch.bfloat16): y = m(torch.ones(1, 2, device=dev))
assert y.dtype == torch.bfloat16 and m.weight.dtype == torch.float32
""",
    "mixed keeps f32 weights; no environment switch may change dtypes (X#6403)",
)
