//! The buffers of activations of a step, and their sizes.

use super::{Activation, LatentAttention, ModelShape};

/// The largest step that buffers have room for.
#[derive(Clone, Copy, Debug)]
pub struct BufferRoom {
    /// New tokens.
    pub tokens: u64,
    /// Sequences.
    pub sequences: u64,
    /// Rows that attend as decodes; none on a member that leaves attention to others.
    pub decodes: u64,
}

impl ModelShape {
    /// The bytes of every buffer of activations that steps of this model use.
    pub fn buffers(&self, room: BufferRoom) -> Vec<(Activation, u64)> {
        use Activation as A;
        let BufferRoom { tokens, sequences, .. } = room;
        let n = u64::from;
        let (x, hidden, inner) = (self.activation.size_bytes(), n(self.hidden), self.inner_length());
        let joined = self.experts.is_some_and(|experts| experts.clamped);
        let raw_k = if self.qk_norm { n(self.kv_heads) * n(self.head_dim) } else { 0 };
        let rotated = self.rotary.map_or(self.head_dim, |part| part.length);
        let rotated = self.latent.map_or(rotated, |latent| latent.rope);
        let mut all = vec![
            (A::Residual, tokens * hidden * 4),
            (A::Normed, tokens.max(sequences) * hidden * x),
            (A::CosSin, tokens * n(rotated) * 4),
            (A::RawK, tokens * raw_k * x),
            (A::Gate, tokens * inner * x * if joined { 2 } else { 1 }),
            (A::Up, if joined { 0 } else { tokens * inner * x }),
            (A::Inner, tokens * inner * x),
            (A::Picked, sequences * hidden * 4),
            (A::Logits, sequences * n(self.vocab) * 4),
        ];
        if self.style.has_second_rope() {
            all.push((A::SecondCosSin, tokens * n(rotated) * 4));
        }
        if self.style.has_post_norms() {
            all.push((A::Branch, tokens * hidden * 4));
        }
        if self.style.has_post_norms() || self.style.scaled_embedding {
            all.push((A::RowFactors, tokens * 4));
        }
        all.extend(self.attention_buffers(room));
        if let Some(experts) = &self.experts {
            let (count, choices) = (n(experts.count), tokens * n(experts.active));
            all.extend([
                (A::ExpertLogits, tokens * count * 4),
                (A::Chosen, choices * 4),
                (A::ChoiceWeights, choices * 4),
                (A::ChoiceOrder, choices * 4),
                (A::ChoiceStarts, (count + 1) * 4),
                (A::Made, choices * hidden * x),
            ]);
        }
        all.extend(self.latent.iter().flat_map(|latent| self.latent_buffers(latent, tokens)));
        all.retain(|(_, bytes)| *bytes > 0);
        all
    }

    /// Buffers that a device needs to run attention for others.
    pub fn attention_buffers(&self, room: BufferRoom) -> [(Activation, u64); 6] {
        use Activation as A;
        let BufferRoom { tokens, decodes, .. } = room;
        let (x, kv) = (self.activation.size_bytes(), self.kv_shape());
        let of_heads = |length: u32| u64::from(self.heads) * u64::from(length);
        let values = match &self.latent {
            Some(latent) => latent.kv_rank.into(),
            None => u64::from(kv.kv_heads) * u64::from(kv.head_dim),
        };
        // with latents, whole queries use the place of the later attention output
        let attended = self.latent.map_or(kv.head_dim, |latent| latent.kv_rank.max(latent.query()));
        [
            (A::Q, tokens * of_heads(kv.head_dim) * x),
            (A::K, tokens * u64::from(kv.kv_heads) * u64::from(kv.head_dim) * x),
            (A::V, tokens * values * x),
            (A::Attended, tokens * of_heads(attended) * x),
            (A::Sums, decodes * of_heads(kv.value_dim()) * 4),
            (A::Stats, decodes * of_heads(2) * 4),
        ]
    }

    fn latent_buffers(&self, latent: &LatentAttention, tokens: u64) -> Vec<(Activation, u64)> {
        use Activation as A;
        let LatentAttention { q_rank, kv_rank, nope, v, .. } = *latent;
        let (heads, x) = (u64::from(self.heads), self.activation.size_bytes());
        let rows = |columns: u32| tokens * u64::from(columns) * x;
        let mut all = vec![
            (A::LowQ, rows(q_rank)),
            (A::LowQNormed, rows(q_rank)),
            (A::RawLatent, rows(kv_rank)),
            (A::HeadParts, heads * rows(nope.max(v))),
            (A::LiftedQ, heads * rows(kv_rank)),
            (A::HeadOrder, tokens * heads * 4),
            (A::HeadStarts, (heads + 1) * 4),
        ];
        all.extend(self.expanded_buffers(latent));
        all
    }

    /// Keys and values expanded from latents, in pages, and their intermediates: latents of a piece, keys and
    /// values of it, and these before padding; and the factors of scores.
    fn expanded_buffers(&self, latent: &LatentAttention) -> [(Activation, u64); 8] {
        use Activation as A;
        let (heads, x) = (u64::from(self.heads), self.activation.size_bytes());
        let LatentAttention { kv_rank, v, .. } = *latent;
        let (query, stored, piece) = (latent.query(), latent.stored(), latent.piece_tokens());
        let of_piece = |columns: u32| u64::from(piece) * u64::from(columns) * x;
        let kv = latent.expanded_kv(self.heads, self.page_tokens, self.activation);
        let page = u64::from(self.page_tokens) * kv.row() * kv.dtype.size_bytes();
        let pool = u64::from(latent.expanded_pages(self.page_tokens)) * page;
        [
            (A::PieceStored, of_piece(stored)),
            (A::PieceLatents, of_piece(kv_rank)),
            (A::PieceFactors, u64::from(piece) * u64::from(stored) * 4),
            (A::PieceKeys, heads * of_piece(query)),
            (A::PieceMade, heads * of_piece(v)),
            (A::PieceValues, heads * of_piece(query)),
            (A::ExpandedKeyPool, pool),
            (A::ExpandedValuePool, pool),
        ]
    }

    /// Bytes of the buffers for keys and values that are made of latents.
    pub fn expanded_bytes(&self) -> u64 {
        let all = self.latent.iter().flat_map(|latent| self.expanded_buffers(latent));
        all.map(|(_, bytes)| bytes).sum()
    }

    /// Bytes that the activations of a step of up to `tokens` tokens and `sequences` sequences take.
    pub fn activation_bytes(&self, tokens: u32, sequences: u32) -> u64 {
        let [tokens, sequences] = [tokens, sequences].map(u64::from);
        self.buffers(BufferRoom { tokens, sequences, decodes: sequences })
            .iter()
            .map(|(_, bytes)| bytes)
            .sum()
    }
}
