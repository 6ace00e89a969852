//! Cases of KV of eight bits.

use super::{Bf16, CaseBuilder, CaseHeads, F16, F32, PrefillMask, SMALL};
use mixfleet_hal::{DType, KvShape, OpSig};

impl CaseBuilder {
    pub(super) fn scaled(&mut self) {
        let p = self.page_tokens;
        for dtype in [DType::F8E4m3, DType::I8] {
            let of = |kv_heads, head_dim, page_tokens| KvShape {
                kv_heads,
                head_dim,
                page_tokens,
                dtype,
                latent: None,
            };
            for page_tokens in self.page_sizes() {
                let kv = of(2, 16, page_tokens);
                for other in DType::KV {
                    for tokens in [1, page_tokens + 1] {
                        if !other.is_scaled() {
                            self.even(OpSig::KvWrite { tokens, x: other, kv });
                        }
                        self.even(OpSig::KvGather { tokens, wire: other, kv });
                        self.even(OpSig::KvScatter { tokens, wire: other, kv });
                    }
                    // KV of a wider dtype that is sent as this one
                    if !other.is_scaled() {
                        let (tokens, kv) = (page_tokens + 1, KvShape { dtype: other, ..kv });
                        self.even(OpSig::KvGather { tokens, wire: dtype, kv });
                        self.even(OpSig::KvScatter { tokens, wire: dtype, kv });
                    }
                }
                let context = page_tokens + 1;
                self.attn_prefill(
                    &[(1, context), (context, context)],
                    SMALL,
                    page_tokens,
                    PrefillMask::NONE,
                    F32,
                    dtype,
                );
                self.attn_decode(&[(0, context), (context / 2, context)], SMALL, page_tokens, F32, dtype);
            }
            for &head_dim in self.head_dims() {
                for kv_heads in [1, 3] {
                    let kv = of(kv_heads, head_dim, p);
                    self.even(OpSig::KvWrite { tokens: 7, x: Bf16, kv });
                    self.even(OpSig::KvGather { tokens: 7, wire: Bf16, kv });
                }
                let shape = CaseHeads { ratio: 3, kv_heads: 2, head_dim };
                self.attn_prefill(&[(7, 7), (4, 30)], shape, p, PrefillMask::NONE, Bf16, dtype);
                self.attn_prefill(&[(9, 9), (3, 20)], shape, p, PrefillMask::window(6, true), F32, dtype);
                self.attn_decode(&[(0, 37), (5, 23)], shape, p, Bf16, dtype);
            }
            for x in [F32, Bf16, F16] {
                let unlike = [(1, 1), (5, 9), (3, (p + 1).max(3)), (1, 40), (17, 17)];
                self.attn_prefill(&unlike, SMALL, p, PrefillMask::NONE, x, dtype);
                self.attn_prefill(&unlike, SMALL, p, PrefillMask::window(8, true), x, dtype);
                let unlike = [(0, 1), (0, 0), (3, p + 2), (p, p), (0, 70), (p - 1, p + 1)];
                self.attn_decode(&unlike, SMALL, p, x, dtype);
            }
            self.attn_decode(&[(0, 1000), (7, 777)], SMALL, p, F32, dtype);
        }
    }
}
