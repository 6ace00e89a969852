//! Grouped-query attention, and the KV of any attention.

use super::{
    Activation, AttentionSizes, KvSizes, LayerOps, LayerRope, ModelShape, OpArg, OpSink, Projection,
    StepTable, Weight,
};
use mixfleet_hal::{KvShape, OpSig};

impl LayerOps<'_> {
    /// Pushes what a layer computes from the residual stream to queries, keys and values.
    pub fn attention_inputs(&self, sizes: &AttentionSizes, ops: &mut impl OpSink) {
        self.attention_rows(sizes.tokens, ops);
        if let Some(latent) = &self.shape.latent {
            self.move_queries(latent, sizes, ops);
            self.lift(latent, sizes.lifted(), ops);
        }
    }

    /// Pushes the operations of a layer from the attention output to the residual stream.
    pub fn attention_outputs(&self, sizes: &AttentionSizes, ops: &mut impl OpSink) {
        if let Some(latent) = &self.shape.latent {
            self.lower(latent, sizes.lifted(), ops);
            self.cut_values(latent, sizes, ops);
        }
        self.attention_sum(sizes.tokens, ops);
    }

    /// The part of the inputs that is the same for all rows.
    pub(crate) fn attention_rows(&self, tokens: u32, ops: &mut impl OpSink) {
        self.block_input(tokens, Weight::AttnNorm, ops);
        match &self.shape.latent {
            Some(latent) => self.latent_rows(latent, tokens, ops),
            None => self.head_rows(tokens, ops),
        }
    }

    /// Queries, keys and values of heads: projections, norms of heads, and rope.
    fn head_rows(&self, tokens: u32, ops: &mut impl OpSink) {
        let ModelShape { heads, kv_heads, head_dim, hidden, activation: x, .. } = *self.shape;
        let (q_columns, kv_columns) = (heads * head_dim, kv_heads * head_dim);
        let (raw_q, raw_k) = match self.shape.qk_norm {
            true => (Activation::Attended, Activation::RawK),
            false => (Activation::Q, Activation::K),
        };
        let bias = |weight| Some(weight).filter(|_| self.shape.qkv_bias);
        let projection = |weight, bias, columns, to| Projection { weight, bias, columns, to };
        let qkv = [
            projection(Weight::Q, bias(Weight::QBias), q_columns, raw_q),
            projection(Weight::K, bias(Weight::KBias), kv_columns, raw_k),
            projection(Weight::V, bias(Weight::VBias), kv_columns, Activation::V),
            // what gates the output beside some linear attention
            projection(Weight::Unserved, bias(Weight::Unserved), q_columns, Activation::Unserved),
        ];
        let is_gated = self.shape.linear.is_some_and(|linear| linear.gated);
        let of = if is_gated { &qkv[..] } else { &qkv[..3] };
        self.products([tokens, hidden], Activation::Normed, of, ops);
        if self.shape.qk_norm {
            for (heads, from, weight, to) in [
                (heads, raw_q, Weight::QNorm, Activation::Q),
                (kv_heads, raw_k, Weight::KNorm, Activation::K),
            ] {
                let size = match self.shape.style.whole_qk_norm {
                    true => [tokens, heads * head_dim],
                    false => [tokens * heads, head_dim],
                };
                self.inner_norm(size, [from.into(), weight.into(), to.into()], ops);
            }
        }
        let cos_sin = match self.rope {
            LayerRope::Main => Activation::CosSin,
            LayerRope::Second => Activation::SecondCosSin,
            LayerRope::Absent => return,
        };
        for (heads, of) in [(heads, Activation::Q), (kv_heads, Activation::K)] {
            let sig = OpSig::Rope { tokens, heads, head_dim, part: self.shape.rotary, x };
            ops.push(sig, &[of.into(), cos_sin.into()]);
        }
    }

    /// The output projection.
    pub(crate) fn attention_sum(&self, tokens: u32, ops: &mut impl OpSink) {
        let heads = self.shape.heads;
        let (from, columns) = match &self.shape.latent {
            Some(latent) => (Activation::HeadParts, heads * latent.v),
            None => (Activation::Attended, heads * self.shape.head_dim),
        };
        let bias = Some(Weight::OBias).filter(|_| self.shape.o_bias);
        self.back([tokens, columns], from, (Weight::O, bias), self.adds, ops);
    }

    /// Pushes what a layer writes to KV and attends to: decodes first, then prefills. `which` is the number
    /// of its `window` among the distinct ones of the sizes.
    pub fn attend(
        &self,
        (which, window): (usize, Option<u32>),
        sizes: &AttentionSizes,
        ops: &mut impl OpSink,
    ) {
        self.write(sizes.written, ops);
        self.attend_decodes(which, sizes, ops);
        match (&self.shape.latent, sizes.expanded_pages_max) {
            (Some(latent), Some(pages_max)) => self.attend_expanded(latent, pages_max, sizes, ops),
            _ => self.attend_prefills((which, window), sizes, ops),
        }
    }

    /// The KV of `rows` rows.
    pub(crate) fn write(&self, tokens: u32, ops: &mut impl OpSink) {
        if tokens == 0 {
            return;
        }
        let kv = self.kv();
        let values = if kv.latent.is_some() { OpArg::Absent } else { Activation::V.into() };
        let args = [Activation::K.into(), values, StepTable::Slots.into(), OpArg::Pools];
        ops.push(OpSig::KvWrite { tokens, x: self.shape.activation, kv }, &args);
    }

    pub(crate) fn attend_decodes(&self, which: usize, sizes: &AttentionSizes, ops: &mut impl OpSink) {
        let AttentionSizes { decodes: sequences, decode_pages_max: pages_max, partial, .. } = *sizes;
        if sequences == 0 {
            return;
        }
        let (kv, heads, x) = (self.kv(), self.shape.heads, self.shape.activation);
        let kv_tokens = sizes.kv[which].decode_tokens;
        let (sums, stats) = (Activation::Sums, Activation::Stats);
        let args = [
            Activation::Q.into(),
            StepTable::Ranges.into(),
            StepTable::DecodePages.into(),
            OpArg::Pools,
            sums.into(),
            stats.into(),
        ];
        ops.push(
            OpSig::AttnDecode { sequences, kv_tokens, heads, pages_max, x, kv, cap: self.score_cap() },
            &args,
        );
        let head_dim = kv.value_dim();
        let mut merge = |first: u32, rows: u32, sinks: u32| {
            if rows == 0 {
                return;
            }
            let from = |buffer, columns: u32| OpArg::From(buffer, u64::from(first) * u64::from(columns));
            let args = [
                from(sums, head_dim),
                from(stats, 2),
                Some(Weight::Sinks).filter(|_| sinks > 0).into(),
                from(Activation::Attended, head_dim),
            ];
            ops.push(OpSig::AttnMerge { parts: 1, rows, head_dim, sinks, out: x }, &args);
        };
        let rows = sequences * heads;
        // sinks of rows that others attend to as well join where all parts are
        let bare = if self.shape.sinks { partial * heads } else { rows };
        merge(0, bare, 0);
        merge(bare, rows - bare, heads);
    }

    pub(crate) fn attend_prefills(
        &self,
        (which, window): (usize, Option<u32>),
        sizes: &AttentionSizes,
        ops: &mut impl OpSink,
    ) {
        if sizes.prefills == 0 {
            return;
        }
        let (kv, heads) = (self.kv(), self.shape.heads);
        let from = |buffer, columns: u32| {
            OpArg::From(buffer, u64::from(sizes.decodes) * u64::from(heads) * u64::from(columns))
        };
        let args = [
            from(Activation::Q, kv.head_dim),
            StepTable::QueryStart.into(),
            StepTable::Context.into(),
            StepTable::PrefillPages.into(),
            OpArg::Pools,
            Some(Weight::Sinks).filter(|_| self.shape.sinks).into(),
            from(Activation::Attended, kv.value_dim()),
        ];
        ops.push(self.prefill_sig((which, window), (kv, sizes.prefill_pages_max), sizes), &args);
    }

    /// Attention of prompts over paged KV; a row of the block table has this many pages.
    pub(crate) fn prefill_sig(
        &self,
        (which, window): (usize, Option<u32>),
        (kv, pages_max): (KvShape, u32),
        sizes: &AttentionSizes,
    ) -> OpSig {
        let KvSizes { prefill_pairs: pairs, prefill_tokens: kv_tokens, .. } = sizes.kv[which];
        let (tokens, sequences) = (sizes.tokens - sizes.decodes, sizes.prefills);
        let ModelShape { heads, sinks, activation: x, .. } = *self.shape;
        OpSig::AttnPrefill {
            tokens,
            sequences,
            pairs,
            kv_tokens,
            heads,
            pages_max,
            window,
            sinks,
            x,
            kv,
            cap: self.score_cap(),
        }
    }
}
