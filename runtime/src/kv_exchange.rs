//! KV exchange with external engines: blocks of host memory as frames, requested by token ids.
//!
//! A frame is a block in the format of the disk tier (payload, then a trailer with namespace, hash, XXH3-64
//! and token ids), with two differences: its namespace is that of the weights, the tokenizer and the dtype of
//! KV without a secret, and its hash is that of the chain in this namespace. So a party that knows the
//! namespace and the prompt can check that a frame is the block of this prompt in this place, and no key of a
//! cache leaves the process. The keys of blocks here are computed here from token ids, in the caller's part
//! of the cache: no caller reads or writes elsewhere.
//!
//! The KV of a frame can only be checked by computing it: every permitted writer is trusted.

use crate::engine::Identity;
use crate::metrics::{ExchangeLabels, Metrics};
use crate::pool::{FrameRefusal, Kept, Layout, Pool};
use mixfleet_hal::op::KvShape;
use mixfleet_scheduler::kv::BlockHash;
use mixfleet_scheduler::kv::hash::PrefixHasher;
use serde_json::{Value, json};
use std::sync::OnceLock;
use twox_hash::XxHash3_64;

/// What a [`KvExchange`] consists of.
pub struct KvExchangeParts {
    /// The address at which external engines reach this server, as in `http://10.0.0.3:8000`.
    pub url: String,
    /// The identity in the keys of blocks.
    pub identity: Identity,
    /// Layers of the model.
    pub layers: u32,
    /// KV of a layer, in blocks.
    pub kv: KvShape,
    /// The tiers below the instances of this process; received blocks go to the first of them.
    pub pools: Vec<Pool>,
    /// Where blocks are counted.
    pub metrics: Metrics,
}

/// The host memory of this process as external engines see it.
pub struct KvExchange {
    parts: KvExchangeParts,
    /// Once the digest of the weights is known.
    namespace: OnceLock<u64>,
}

/// A prompt, and the keys of its whole blocks.
pub struct ExchangePrompt {
    tokens: Vec<u32>,
    /// In the caller's part of the cache.
    own: Vec<BlockHash>,
    /// In frames.
    open: Vec<BlockHash>,
    layout: Layout,
}

impl ExchangePrompt {
    /// Number of whole blocks.
    pub fn blocks(&self) -> usize {
        self.own.len()
    }

    fn block(&self, block: usize) -> &[u32] {
        &self.tokens[block * self.layout.block_tokens..(block + 1) * self.layout.block_tokens]
    }

    /// The frame of a block with this KV; none if the prompt has no such block, or that is no block's length.
    pub fn frame(&self, block: usize, kv: &[u8]) -> Option<Vec<u8>> {
        let hash = *self.open.get(block).filter(|_| kv.len() == self.layout.block_bytes)?;
        let mut frame = Vec::with_capacity(self.layout.frame_bytes());
        frame.extend_from_slice(kv);
        self.layout.add_trailer(&mut frame, hash, self.block(block), XxHash3_64::oneshot(kv));
        Some(frame)
    }

    /// Whether a frame is a block of this prompt.
    ///
    /// # Errors
    /// Why it is not.
    pub fn check(&self, block: usize, frame: &[u8]) -> Result<(), KvRefusal> {
        let hash = *self.open.get(block).ok_or(KvRefusal::NoSuchBlock)?;
        self.layout.check(frame, hash, self.block(block))?;
        Ok(())
    }
}

/// Why a frame is not taken in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvRefusal {
    /// It is not the block that it should be.
    #[error("{0}")]
    Damaged(&'static str),
    /// It is intact and has other token ids than the prompt.
    #[error("its token ids differ from the prompt's at this position")]
    OtherTokens,
    /// The prompt has no such block.
    #[error("the prompt has no such block")]
    NoSuchBlock,
    /// All of host memory is in use.
    #[error("all blocks of host memory are in use")]
    Full,
    /// Host memory failed.
    #[error("{0}")]
    Failed(String),
}

impl From<FrameRefusal> for KvRefusal {
    fn from(refusal: FrameRefusal) -> Self {
        match refusal {
            FrameRefusal::Damaged(why) => KvRefusal::Damaged(why),
            FrameRefusal::OtherTokens => KvRefusal::OtherTokens,
        }
    }
}

impl std::fmt::Debug for KvExchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvExchange").field("url", &self.parts.url).finish_non_exhaustive()
    }
}

impl KvExchangeParts {
    /// An exchange whose namespace is not known yet.
    ///
    /// # Errors
    /// When there is no host memory for KV, or instances keep blocks of unlike sizes.
    pub fn open(self) -> Result<KvExchange, String> {
        let (bytes, tokens) = self.block_size();
        match self.pools.iter().map(Pool::block_size).find(|size| *size != (bytes, tokens)) {
            _ if self.pools.is_empty() => Err("there is no host memory for KV".into()),
            Some((_, other)) => Err(format!("instances have blocks of {tokens} and of {other} tokens")),
            None => Ok(KvExchange { parts: self, namespace: OnceLock::new() }),
        }
    }

    /// Bytes and tokens of a block.
    fn block_size(&self) -> (usize, usize) {
        let bytes = u64::from(self.layers * self.kv.page_tokens) * self.kv.wire_token_bytes(self.kv.dtype);
        (usize::try_from(bytes).unwrap_or(usize::MAX), self.kv.page_tokens as usize)
    }
}

impl KvExchange {
    /// Begins, once the weights have this digest.
    pub fn know(&self, model_digest: String) {
        let identity = Identity { model_digest, ..self.parts.identity.clone() };
        let _ = self.namespace.set(identity.open_namespace(self.parts.kv.dtype));
    }

    fn layout(&self) -> Option<Layout> {
        let (block_bytes, block_tokens) = self.parts.block_size();
        Some(Layout { block_bytes, block_tokens, namespace: *self.namespace.get()? })
    }

    /// Bytes of a frame; none until the namespace is known.
    pub fn frame_bytes(&self) -> Option<usize> {
        self.layout().map(|layout| layout.frame_bytes())
    }

    /// What another engine needs to know; none until the namespace is known.
    pub fn described(&self) -> Option<Value> {
        let (layout, KvExchangeParts { layers, kv, .. }) = (self.layout()?, &self.parts);
        Some(json!({
            "schema": "mixfleet.kv/1",
            "namespace": format!("{:016x}", layout.namespace),
            "block_tokens": layout.block_tokens,
            "block_bytes": layout.block_bytes,
            "frame_bytes": layout.frame_bytes(),
            "layers": layers,
            "kv_heads": kv.kv_heads,
            "head_dim": kv.head_dim,
            "dtype": kv.dtype.name(),
        }))
    }

    /// Where another engine finds the KV of a prompt of this many tokens, in the form of vLLM's routers.
    pub fn hand_over(&self, prompt_tokens: usize, cache_salt: Option<&str>) -> Value {
        let block_tokens = self.parts.kv.page_tokens as usize;
        let mut told = json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_url": self.parts.url,
            "remote_num_tokens": prompt_tokens / block_tokens * block_tokens,
        });
        if let Some(salt) = cache_salt {
            told["cache_salt"] = salt.into();
        }
        told
    }

    /// The keys of a prompt, in the part of the cache that `cache_salt` separates; none until the namespace
    /// is known.
    pub fn prompt(&self, tokens: Vec<u32>, cache_salt: Option<String>) -> Option<ExchangePrompt> {
        let KvExchangeParts { identity, kv, .. } = &self.parts;
        let layout = self.layout()?;
        let own = identity.hasher(kv.dtype, cache_salt).chain(&tokens, kv.page_tokens);
        let open = PrefixHasher::open(layout.namespace).chain(&tokens, kv.page_tokens);
        Some(ExchangePrompt { tokens, own, open, layout })
    }

    /// Frames of the blocks from `first` on, of `bytes_max` bytes or one at least, up to the first that is
    /// not in host memory with all before it.
    pub fn frames(&self, prompt: &ExchangePrompt, first: usize, bytes_max: usize) -> Vec<u8> {
        let layout = &prompt.layout;
        let mut frames = Vec::new();
        let end = prompt.blocks().min(first.saturating_add((bytes_max / layout.frame_bytes()).max(1)));
        for pool in &self.parts.pools {
            // a prefix that is longer would be read from the disk again for each of its blocks
            let end = end.min(pool.dram_slots());
            let lease = pool.lease(&prompt.own[..end], &prompt.tokens);
            for block in first..lease.len() {
                let mut frame = None;
                let viewed = lease.view(block, &mut |kv| frame = prompt.frame(block, kv));
                let Some(frame) = frame.filter(|_| viewed.is_ok()) else { break };
                self.count("out", "sent", frame.len());
                frames.extend(frame);
            }
            if !frames.is_empty() {
                break;
            }
        }
        frames
    }

    /// Takes a block of a prompt into host memory.
    ///
    /// # Errors
    /// Why it is not taken.
    pub fn take(&self, prompt: &ExchangePrompt, block: usize, frame: &[u8]) -> Result<Kept, KvRefusal> {
        let taken = prompt.check(block, frame).and_then(|()| self.keep(prompt, block, frame));
        let outcome = match &taken {
            Ok(Kept::Stored) => "stored",
            Ok(_) => "held",
            Err(KvRefusal::Full | KvRefusal::Failed(_)) => "no_room",
            Err(refusal) => {
                tracing::warn!(block, %refusal, "KV of another engine failed its check and was refused");
                "refused"
            }
        };
        self.count("in", outcome, frame.len());
        taken
    }

    fn keep(&self, prompt: &ExchangePrompt, block: usize, frame: &[u8]) -> Result<Kept, KvRefusal> {
        let payload = &frame[..prompt.layout.block_bytes];
        let kept = self.parts.pools[0].keep(prompt.own[block], prompt.block(block), &mut |place| {
            place.copy_from_slice(payload);
            Ok(())
        });
        match kept.map_err(|error| KvRefusal::Failed(error.to_string()))? {
            Kept::Full => Err(KvRefusal::Full),
            Kept::Collision => Err(KvRefusal::OtherTokens),
            kept => Ok(kept),
        }
    }

    /// Ends a write of leading blocks up to `end`: the last one will be the first to leave host memory, and
    /// the instance is notified.
    pub fn settle(&self, prompt: &ExchangePrompt, end: usize) {
        let pool = &self.parts.pools[0];
        let end = end.min(prompt.blocks()).min(pool.dram_slots());
        drop(pool.lease(&prompt.own[..end], &prompt.tokens));
        pool.announce();
    }

    fn count(&self, direction: &'static str, outcome: &'static str, bytes: usize) {
        let labels = ExchangeLabels { direction, outcome };
        self.parts.metrics.kv_exchange_blocks.get_or_create(&labels).inc();
        self.parts.metrics.kv_exchange_bytes.get_or_create(&labels).inc_by(bytes as u64);
    }
}
