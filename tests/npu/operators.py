"""References of the torch_npu operators the product calls, in plain torch, with the vendor's contracts checked.

SCHEMAS are the vendor's own (torch_npu 2.13.0), so torch itself refuses what the real operators would refuse: unknown
names and wrong kinds. The rest of a contract is checked here and broken loudly with OperatorError. A test with these
shows that arguments are right, not that the vendor's kernels compute well.

Memory: cached positions from a sequence's end on are never looked at, nor blocks that left every query's window. Any
other position is read, and what stands there may matter even where it is masked: 0 · NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from npu.paged_call import OperatorError, PagedCall, require

__all__ = ["FLOATS", "HALF", "SCHEMAS", "OperatorError", "References"]
SCHEMAS = {
    "npu_rms_norm": "(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_add_rms_norm": "(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
    "npu_rotary_mul": "(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor",
    "npu_swiglu": "(Tensor input, int dim=-1) -> Tensor",
    "npu_scatter_pa_kv_cache": "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, Tensor? seq_lens=None, "
    "str? cache_mode='PA_NZ') -> ()",
    "npu_fused_infer_attention_score": "(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, "
    "Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, "
    "Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, "
    "Tensor? quant_offset2=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, "
    "Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, "
    "Tensor? value_antiquant_offset=None, Tensor? block_table=None, Tensor? query_padding_size=None, "
    "Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, "
    "SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None, "
    "Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1.0, int pre_tokens=2147483647, "
    'int next_tokens=2147483647, str input_layout="BSH", int num_key_value_heads=0, int sparse_mode=0, '
    "int inner_precise=0, int block_size=0, int antiquant_mode=0, int key_antiquant_mode=0, "
    "int value_antiquant_mode=0, bool softmax_lse_flag=False) -> (Tensor, Tensor)",
}
HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)
Touch = Callable[[torch.Tensor], None]


def require_contiguous(**tensors: torch.Tensor) -> None:
    """OperatorError naming the first that is not: operators read memory from its first element on."""
    for name, tensor in tensors.items():
        require(tensor.is_contiguous(), f"{name} is not contiguous: {list(tensor.shape)}, {tensor.stride()}")


def require_types(allowed: Sequence[torch.dtype], **tensors: torch.Tensor) -> None:
    """OperatorError unless all are of one type, and that is allowed."""
    found = {name: tensor.dtype for name, tensor in tensors.items()}
    require(len(set(found.values())) == 1 and set(found.values()) <= set(allowed), f"types {found} are not one allowed")


class References:
    """The operators as attributes, bound to SCHEMAS, on cpu tensors.

    `attention_dtypes` may name float32 too, which the vendor's attention does not take: for comparing tokens exactly.
    `touch`, if set, is shown every piece of a cache before it is read or written.
    """

    device = torch.device("cpu")

    def __init__(self, *, attention_dtypes: Sequence[torch.dtype] = HALF) -> None:
        self.attention_dtypes = attention_dtypes
        self.touch: Touch | None = None
        self.calls: list[str] = []
        namespace = f"npu_reference_{id(self)}"
        self._library = torch.library.Library(namespace, "DEF")
        for name, schema in SCHEMAS.items():
            self._library.define(name + schema)
            self._library.impl(name, self._counted(name), "CPU")
        self._bound = getattr(torch.ops, namespace)

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name not in SCHEMAS:
            raise AttributeError(name)
        return getattr(self._bound, name)

    def run(self, name: str, *args: object, **kwargs: object) -> object:
        """Operator `name` on cpu tensors, arguments already bound.

        Besides SCHEMAS: the forms of attention that captures use, which torch_npu puts in the place of the plain one.
        """
        self.calls.append(name)
        return getattr(self, "_" + name.removeprefix("_").removeprefix("npu_"))(*args, **kwargs)

    def _counted(self, name: str) -> Callable[..., object]:
        return lambda *args, **kwargs: self.run(name, *args, **kwargs)

    def _touched(self, piece: torch.Tensor) -> torch.Tensor:
        if self.touch is not None:
            self.touch(piece)
        return piece

    # --- rows -------------------------------------------------------------------------------------------------------

    def _rms_norm(self, x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, ...]:
        require_types(FLOATS, x=x, gamma=gamma)
        require_contiguous(x=x, gamma=gamma)
        require(x.shape[-gamma.dim() :] == gamma.shape, f"gamma {list(gamma.shape)} does not end x {list(x.shape)}")
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
        return (gamma.float() * (x.float() * rstd)).to(x.dtype), rstd

    def _add_rms_norm(
        self, x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
    ) -> tuple[torch.Tensor, ...]:
        require_types(FLOATS, x1=x1, x2=x2, gamma=gamma)
        require_contiguous(x1=x1, x2=x2)
        require(x1.shape == x2.shape, f"x1 {list(x1.shape)} and x2 {list(x2.shape)} differ")
        total = (x1.float() + x2.float()).to(x1.dtype)
        normed, rstd = self._rms_norm(total, gamma, epsilon)
        return normed, rstd, total

    def _rotary_mul(
        self,
        x: torch.Tensor,
        r1: torch.Tensor,
        r2: torch.Tensor,
        rotary_mode: str = "half",
        rotate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        require(rotary_mode == "half" and rotate is None, "only half is emulated")
        require_types(FLOATS, x=x, r1=r1, r2=r2)
        require_contiguous(x=x, r1=r1, r2=r2)
        require(x.dim() == r1.dim() == r2.dim() == 4, "four dimensions each")
        batch, tokens, heads, width = x.shape
        require(width % 2 == 0 and width < 896 and batch < 1000 and heads < 1000, f"sizes {list(x.shape)}")
        require(r1.shape == r2.shape == (1, tokens, 1, width), f"r1 {list(r1.shape)} for BSND {list(x.shape)}")
        low, high = x.float().chunk(2, dim=-1)
        return (r1.float() * x.float() + r2.float() * torch.cat([-high, low], dim=-1)).to(x.dtype)

    def _swiglu(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        require_types(FLOATS, x=x)
        require_contiguous(x=x)
        require(x.shape[dim] % 2 == 0, f"dimension {dim} of {list(x.shape)} is odd")
        gate, up = x.float().chunk(2, dim=dim)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)

    # --- the cache --------------------------------------------------------------------------------------------------

    def _scatter_pa_kv_cache(  # noqa: PLR0913 - the vendor's signature
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        compress_lens: torch.Tensor | None = None,
        compress_seq_offsets: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        cache_mode: str | None = "PA_NZ",
    ) -> None:
        require(cache_mode == "Norm", f"cache_mode {cache_mode}: only Norm is emulated")
        require(compress_lens is compress_seq_offsets is seq_lens is None, "no compression is emulated")
        require_types(FLOATS, key=key, value=value, key_cache=key_cache, value_cache=value_cache)
        require_types((torch.int32, torch.int64), slot_mapping=slot_mapping)
        require_contiguous(
            key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping
        )
        require(key.dim() == value.dim() == 3 and key_cache.dim() == 4, "key [T, G, D], key_cache [blocks, size, G, D]")
        require(key.shape[:2] == value.shape[:2] == (slot_mapping.shape[0], key_cache.shape[2]), "T or G differ")
        require(key_cache.shape[3] == key.shape[2] and value_cache.shape[3] == value.shape[2], "D differs")
        blocks, block_size = key_cache.shape[:2]
        slots = slot_mapping.tolist()
        require(len(set(slots)) == len(slots), f"slots repeat: {slots}")
        require(all(0 <= slot < blocks * block_size for slot in slots), f"slots {slots} of {blocks * block_size}")
        if self.touch is None:
            key_cache.view(-1, *key.shape[1:])[slot_mapping.long()] = key
            value_cache.view(-1, *value.shape[1:])[slot_mapping.long()] = value
            return
        for token, slot in enumerate(slots):
            self._touched(key_cache[slot // block_size, slot % block_size]).copy_(key[token])
            self._touched(value_cache[slot // block_size, slot % block_size]).copy_(value[token])

    def _fused_infer_attention_score(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        workspace: torch.Tensor | None = None,
        out: Sequence[torch.Tensor] | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, ...]:
        require_types(self.attention_dtypes, query=query, key=key, value=value)
        require_contiguous(query=query, key=key, value=value)
        require((workspace is None) == (out is None), "what is captured needs both, workspace and out")
        call = PagedCall(query, key, value, **options)
        attended, nothing = self._infer_output(query) if out is None else out
        first = 0
        for row, end in enumerate(call.actual_seq_lengths):
            if end > first:
                attended[first:end] = self._attend(call, row, (first, end))
            first = end
        return attended, nothing

    def _fused_infer_attention_score_get_max_workspace(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        PagedCall(*tensors, **options)
        return torch.zeros(32, dtype=torch.uint8)

    def _fused_infer_attention_score_infer_output(
        self, query: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._infer_output(query)

    @staticmethod
    def _infer_output(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(attention, log-sum-exp that nobody asked for)."""
        return torch.empty_like(query), torch.zeros(1)

    def _attend(self, call: PagedCall, row: int, span: tuple[int, int]) -> torch.Tensor:
        """The queries [first, end) of one sequence: their tokens are its last."""
        first, end = span
        length, count = call.actual_seq_lengths_kv[row], end - first
        own = torch.arange(length - count, length)[:, None]
        begin = max(0, length - count - call.pre_tokens) // call.block_size  # the first block any query's band touches
        stop = -(-length // call.block_size)
        read = range(begin * call.block_size, length)
        keys, values = (
            torch.cat([self._touched(side[block]) for block in call.block_table[row, begin:stop].tolist()])
            .unflatten(1, (call.num_key_value_heads, -1))[: len(read)]
            .float()
            for side in (call.key, call.value)
        )
        seen = torch.arange(read.start, read.stop)[None]
        hidden = (seen > own) | (seen < own - call.pre_tokens)
        q = call.query[first:end].float().unflatten(1, (call.num_key_value_heads, -1))
        scores = torch.einsum("nghd,tgd->nght", q, keys) * call.scale
        weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
        return torch.einsum("nght,tgd->nghd", weights, values).flatten(1, 2)
