"""Attention with its probabilities, by hand and in models of transformers, and the softmax module of Megatron."""

import copy
import enum
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import onepass
from lib.support import DTYPES, maker, same
from onepass import reference

F32, F64 = torch.float32, torch.float64
attention: Any = onepass.nn.functional_attention


def operands(dtype: torch.dtype = F32, heads: int = 4, device: str = "cpu") -> list[Tensor]:
    make = maker(dtype, device, scale=1.0)
    return [make(2, 4, 5, 8), make(2, heads, 7, 8), make(2, heads, 7, 6)]


@pytest.mark.parametrize("heads", [4, 2, 1])
def test_what_torchs_attention_gives(heads, dtype, device):
    q, k, v = operands(dtype, heads, device)
    mask = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(1)).to(device) > 0.3
    bias = maker(dtype, device, 4)(4, 5, 7)
    eps = 16 * torch.finfo(dtype).eps
    for ours, theirs in (
        ({}, {}),
        ({"scale": 0.3}, {"scale": 0.3}),
        ({"mask": mask}, {"attn_mask": mask}),
        ({"bias": bias}, {"attn_mask": bias}),
        ({"causal": True, "offset": 0}, {"is_causal": True}),
    ):
        want = sdpa(
            q.double(),
            k.double(),
            v.double(),
            enable_gqa=True,
            **{n: t.double() if n == "attn_mask" and t.dtype is dtype else t for n, t in theirs.items()},
        )
        torch.testing.assert_close(attention(q, k, v, enable_gqa=True, **ours).double(), want, rtol=eps, atol=eps)
    if heads == 4:
        torch.testing.assert_close(
            attention(q, k, v).double(), sdpa(q.double(), k.double(), v.double()), rtol=eps, atol=eps
        )


def test_probabilities_and_all_scores(device):
    q, k, v = operands(F64, 2, device)
    options = {
        "bias": maker(F64, device, 4)(7),
        "mask": torch.arange(7, device=device) > 0,
        "causal": True,
        "window": (3, None),
        "alibi": torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=F64, device=device),
        "softcap": 5.0,
        "sink": torch.zeros(4, 1, 1, dtype=F64, device=device),
        "empty": "zero",
    }
    y, p = attention(q, k, v, enable_gqa=True, return_probabilities=True, **options)
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    want = reference.softmax(q @ k.mT, scale=8**-0.5, **options)
    torch.testing.assert_close(p, want)
    torch.testing.assert_close(y, want @ v)


def test_gradients_dropout_and_graphs():
    q, k, v = (t.requires_grad_() for t in operands(F64, 2))
    call = lambda q, k, v: attention(q, k, v, causal=True, enable_gqa=True)  # noqa: E731
    assert torch.autograd.gradcheck(call, (q, k, v), fast_mode=True)
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), call(q, k, v))
    y, p = attention(*operands(), dropout_p=0.5, return_probabilities=True)
    assert 0 < int((p == 0).sum()) < p.numel()
    torch.testing.assert_close(y, p @ operands()[2])


def test_without_heads_and_what_is_refused():
    q, k, v = (t[0, 0] for t in operands())
    torch.testing.assert_close(attention(q, k, v), sdpa(q[None], k[None], v[None])[0])
    q, k, v = operands(heads=3)
    with pytest.raises(ValueError, match="the heads of q are a multiple of those of k, got 4 and 3"):
        attention(q, k, v, enable_gqa=True)
    with pytest.raises(RuntimeError, match="4"):
        attention(q, k, v)
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_causal'"):
        attention(q, k[:, :1], v[:, :1], enable_gqa=True, is_causal=True)


# Models of transformers -----------------------------------------------------------------------------------------------

SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
MODELS = {  # with grouped heads; with a softcap and a sliding window; with sinks
    "Llama": {},
    "Gemma2": {"sliding_window": 4, "attn_logit_softcapping": 2.0},
    "GptOss": {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", MODELS)
def test_a_model_has_the_logits_of_eager_attention(family):
    transformers = pytest.importorskip("transformers")
    onepass.nn.register_hf_attention()
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL, **MODELS[family])
    kind = getattr(transformers, f"{family}ForCausalLM")
    eager = kind._from_config(config, attn_implementation="eager").eval()
    ours = kind._from_config(copy.deepcopy(config), attn_implementation="onepass").eval()
    ours.load_state_dict(eager.state_dict())
    assert ours.config._attn_implementation == "onepass"
    tokens, mask = torch.randint(1, 50, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0  # padding to the left
    got, want = (m(tokens, attention_mask=mask, output_attentions=True) for m in (ours, eager))
    at = mask.bool()
    torch.testing.assert_close(got.logits[at], want.logits[at], rtol=1e-4, atol=1e-5)
    assert len(got.attentions) == 2
    for one, other in zip(got.attentions, want.attentions, strict=True):
        torch.testing.assert_close(one.transpose(1, 2)[at], other.transpose(1, 2)[at], rtol=1e-4, atol=1e-6)
    written = [m.generate(tokens[1:], max_new_tokens=6, do_sample=False) for m in (ours, eager)]
    assert torch.equal(*written)
    grads = []
    for model in (ours, eager):
        model(tokens, attention_mask=mask).logits[at].square().sum().backward()
        grads.append(next(p.grad for name, p in model.named_parameters() if "q_proj.weight" in name))
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


# Megatron's module ----------------------------------------------------------------------------------------------------


class AttnMaskType(enum.Enum):  # as Megatron has it
    padding = 1
    causal = 2


def megatron(x: Tensor, scale: float | None, mask: Tensor | None, causal: bool) -> Tensor:
    """Megatron's own arithmetic, in float32, but for rows of which nothing is left."""
    s = x.float() * (1 if scale is None else scale)
    masked = torch.zeros(x.shape, dtype=torch.bool) if mask is None else mask.expand(x.shape)
    if causal:
        masked = masked | torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    y = torch.softmax(s.masked_fill(masked, -10000.0), -1)
    return y.masked_fill(masked.all(-1, keepdim=True), 0).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["padding", "causal", "padding_causal", "no_mask", *AttnMaskType], ids=str)
def test_megatrons_softmax(kind, dtype):
    name = getattr(kind, "name", kind)
    x = maker(dtype)(2, 3, 6, 6)
    mask = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(0)) > 0.6
    mask[0, 0, 2] = True
    for scale, given in ((None, None), (0.125, None if name == "no_mask" else mask)):
        module = onepass.nn.ScaledMaskedSoftmax(scale, kind)
        y = module(x, given)
        assert y.dtype is dtype
        eps = 2 * torch.finfo(torch.float32 if dtype is F64 else dtype).eps
        torch.testing.assert_close(y, megatron(x, scale, given, "causal" in name), rtol=eps, atol=eps)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert same(other(x, given), y)
            assert repr(other) == repr(module)
    sinks = torch.tensor([0.0, 1.0, -torch.inf])
    y = onepass.nn.ScaledMaskedSoftmax(0.5, kind)(x, None, sinks)
    want = reference.softmax(x, scale=0.5, causal="causal" in name, sink=sinks.view(3, 1, 1))
    torch.testing.assert_close(y, want.to(dtype))


def test_megatrons_softmax_refuses():
    softmax = onepass.nn.ScaledMaskedSoftmax
    assert repr(softmax(softmax_in_fp32=False)) == "ScaledMaskedSoftmax(attn_mask_type=padding, softmax_in_fp32=False)"
    with pytest.raises(ValueError, match=r"attn_mask_type must be one of .*'padding_causal'\), got 'arbitrary'"):
        softmax(attn_mask_type="arbitrary")
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="takes no mask, got one"):
        softmax(attn_mask_type="no_mask")(x, x.bool())
    with pytest.raises(TypeError, match=r"must be of torch.bool, True where masked out, got torch.float32"):
        softmax()(x, x)
