//! What engines have cached, in our hashes, so that requests are placed where their prefix is.
//!
//! One task per engine follows its cache. The blocks that it names are kept with our keys, and the machine is
//! notified of the keys. A request's token ids are requested from an engine: without them, it is placed as if
//! none of its prompt were cached.

use super::{EngineSpec, Gateway, RelayRequest};
use crate::env::Env;
use mixfleet_hal::DType;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::outside::{
    EngineBlock, EngineCall, EngineFaultKind, EngineKvChange, EngineShare, OutsideEngine,
};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::{Event, InstanceId, PromptChain};
use mixfleet_scheduler::kv::hash::{Namespace, PrefixHasher};
use mixfleet_scheduler::kv::{BlockHash, Tier};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Dtype that the machine has for all engines' KV: it only separates kinds of blocks.
pub(super) const KV_DTYPE: DType = DType::F16;
/// Blocks of an engine that are known at most.
const BLOCKS_MAX: usize = 1 << 21;
/// Time in which an engine is to say the token ids of a request.
const READ_MAX: Duration = Duration::from_millis(250);
/// Time without token id requests to an engine after one did not return them.
const READ_AGAIN: Seconds = Seconds(1.0);
/// Time until an engine that could not be asked for its cache's content is asked again.
const FOLLOW_AGAIN: Duration = Duration::from_secs(10);

/// The blocks that an engine has.
#[derive(Debug, Default)]
pub(super) struct EngineCache {
    /// Tokens of a block; blocks of another size are not counted.
    block_tokens: u32,
    /// Our key of each block of a part, and how often it was stored.
    known: HashMap<(u32, EngineBlock), (BlockHash, u32)>,
    /// In how many places each key is.
    places: HashMap<BlockHash, u32>,
    /// Whether it is being followed.
    pub(super) is_followed: bool,
    is_odd_said: bool,
}

/// How the set of keys changes.
#[derive(Debug, PartialEq, Eq)]
enum KeysChange {
    Come(Vec<BlockHash>),
    Gone(Vec<BlockHash>),
    Cleared,
}

impl EngineCache {
    /// Takes a change.
    fn apply(&mut self, hasher: &PrefixHasher, change: &EngineKvChange) -> Option<KeysChange> {
        match change {
            EngineKvChange::Stored { part, parent, blocks, tokens, block_tokens } => {
                if *block_tokens != self.block_tokens || tokens.len() != blocks.len() * *block_tokens as usize
                {
                    return None;
                }
                let mut before = match parent {
                    None => None,
                    Some(parent) => Some(self.known.get(&(*part, *parent))?.0),
                };
                let mut come = Vec::new();
                for (block, tokens) in blocks.iter().zip(tokens.chunks(*block_tokens as usize)) {
                    let place = (*part, *block);
                    let key = if let Some((key, times)) = self.known.get_mut(&place) {
                        *times = times.saturating_add(1);
                        *key
                    } else if self.known.len() == BLOCKS_MAX {
                        break;
                    } else {
                        let key = hasher.next(before, tokens);
                        self.known.insert(place, (key, 1));
                        let places = self.places.entry(key).or_default();
                        *places += 1;
                        if *places == 1 {
                            come.push(key);
                        }
                        key
                    };
                    before = Some(key);
                }
                Some(KeysChange::Come(come)).filter(|change| *change != KeysChange::Come(Vec::new()))
            }
            EngineKvChange::Removed { part, blocks } => {
                let gone: Vec<BlockHash> =
                    blocks.iter().filter_map(|block| self.remove((*part, *block), false)).collect();
                (!gone.is_empty()).then_some(KeysChange::Gone(gone))
            }
            EngineKvChange::Cleared { part } | EngineKvChange::Lost { part, .. } => {
                let mut all: Vec<(u32, EngineBlock)> =
                    self.known.keys().filter(|(of, _)| of == part).copied().collect();
                if all.len() == self.known.len() {
                    self.known.clear();
                    self.places.clear();
                    return (!all.is_empty()).then_some(KeysChange::Cleared);
                }
                all.sort_unstable();
                let gone: Vec<BlockHash> =
                    all.into_iter().filter_map(|place| self.remove(place, true)).collect();
                (!gone.is_empty()).then_some(KeysChange::Gone(gone))
            }
        }
    }

    /// Removes a block once, or however often it was stored; returns its key if it is nowhere else.
    fn remove(&mut self, place: (u32, EngineBlock), at_all: bool) -> Option<BlockHash> {
        let (key, times) = self.known.get_mut(&place)?;
        *times -= 1;
        if *times > 0 && !at_all {
            return None;
        }
        let key = *key;
        self.known.remove(&place);
        let places = self.places.get_mut(&key)?;
        *places -= 1;
        if *places > 0 {
            return None;
        }
        self.places.remove(&key);
        Some(key)
    }

    /// Begins anew with blocks of this size, if it is another one.
    pub(super) fn set_block_tokens(&mut self, block_tokens: u32) {
        if self.block_tokens != block_tokens {
            *self = EngineCache { block_tokens, is_followed: self.is_followed, ..EngineCache::default() };
        }
    }

    /// All keys.
    fn keys(&self) -> Vec<BlockHash> {
        let mut keys: Vec<BlockHash> = self.places.keys().copied().collect();
        keys.sort_unstable();
        keys
    }
}

/// The known content of an engine's cache, for display.
#[derive(Clone, Debug, serde::Serialize)]
pub(crate) struct CacheView {
    engine: String,
    is_followed: bool,
    block_tokens: u32,
    /// The engine's own names of the blocks, by part.
    blocks: BTreeSet<(u32, u64)>,
    /// Number of its keys in the machine.
    keys: usize,
}

/// The hasher of a gateway's prompts. The hashes never leave the process.
pub(super) fn hasher(env: &dyn Env, model: &str) -> PrefixHasher {
    let secret = [env.random().to_le_bytes(), env.random().to_le_bytes()].concat();
    let namespace = Namespace {
        model_digest: model.to_owned(),
        tokenizer_digest: String::new(),
        kv_dtype: KV_DTYPE,
        cache_salt: None,
    };
    PrefixHasher::new(&secret, &namespace)
}

/// Follows an engine's cache until the gateway is gone.
pub(super) async fn follow(gateway: Weak<Gateway>, at: usize) {
    let parts = gateway.upgrade().map(|gateway| {
        let up = gateway.members[at].up.subscribe();
        (up, gateway.engine(at).clone(), gateway.env.clone())
    });
    let Some((mut up, engine, env)) = parts else { return };
    // the sender of `up` is gone with the gateway
    while up.wait_for(|up| *up).await.is_ok() {
        match engine.follow_kv().await {
            Ok(mut feed) => {
                let Some(strong) = gateway.upgrade() else { return };
                strong.set_followed(at, true);
                drop(strong);
                loop {
                    let changes = tokio::select! {
                        biased;
                        _ = up.wait_for(|up| !up) => break,
                        changes = feed.next() => changes,
                    };
                    let Some(strong) = gateway.upgrade() else { return };
                    strong.cache_changed(at, &changes);
                }
                let Some(strong) = gateway.upgrade() else { return };
                strong.set_followed(at, false);
            }
            Err(fault) => {
                let missing = format!("its cached blocks are unknown: {fault}");
                let is_final = fault.kind != EngineFaultKind::Unreachable;
                tracing::warn!(engine = engine.name(), missing, "an engine reports incomplete data");
                tokio::select! {
                    _ = up.wait_for(|up| !up) => {}
                    () = env.sleep(FOLLOW_AGAIN), if !is_final => {}
                }
                // what it last said stays when the sender is gone
                if gateway.strong_count() == 0 {
                    return;
                }
            }
        }
    }
}

impl Gateway {
    fn set_followed(&self, at: usize, is_followed: bool) {
        let mut state = self.lock();
        let instance = InstanceId(to_u32(at));
        let cache = &mut state.seats[at].cache;
        *cache = EngineCache { block_tokens: cache.block_tokens, is_followed, ..EngineCache::default() };
        if state.seats[at].instance.is_some() {
            state.front.step(Event::KvCleared { instance });
        }
    }

    fn cache_changed(&self, at: usize, changes: &[EngineKvChange]) {
        let engine = self.engine(at).name();
        let instance = InstanceId(to_u32(at));
        for change in changes {
            let mut state = self.lock();
            let seat = &mut state.seats[at];
            let is_up = seat.instance.is_some();
            let expected = seat.cache.block_tokens;
            if let EngineKvChange::Stored { block_tokens, .. } = change
                && *block_tokens != expected
                && !std::mem::replace(&mut seat.cache.is_odd_said, true)
            {
                tracing::warn!(engine, block_tokens, expected, "blocks of another size are not counted");
            }
            let event = match seat.cache.apply(&self.hasher, change) {
                Some(KeysChange::Come(hashes)) => Event::KvStored { instance, hashes, tier: Tier::Device },
                Some(KeysChange::Gone(hashes)) => Event::KvEvicted { instance, hashes, tier: Tier::Device },
                Some(KeysChange::Cleared) => Event::KvCleared { instance },
                None => continue,
            };
            if is_up {
                state.front.step(event);
            }
        }
        for change in changes {
            if let EngineKvChange::Lost { part, cause } = change {
                tracing::warn!(engine, part, cause, "cached blocks of an engine are unknown for now");
            }
        }
    }

    /// Requests the token ids of a request from an engine, and adds their keys for placement.
    pub(super) async fn read_prompt(&self, mut wanted: RelayRequest) -> RelayRequest {
        let Some((engine, sizes)) = self.reader() else { return wanted };
        let call = EngineCall {
            endpoint: wanted.endpoint,
            body: wanted.body.clone(),
            stream: wanted.stream,
            begun: None,
            tokens_max: None,
            trace: None,
            share: EngineShare::Whole,
        };
        let asked = tokio::select! {
            biased;
            asked = engine.prompt_tokens(&call) => asked.map_err(|fault| fault.to_string()),
            () = self.env.sleep(READ_MAX) => Err(format!("not within {} ms", READ_MAX.as_millis())),
        };
        match asked {
            Ok(Some(ids)) => {
                // the last token is computed in any case
                let reused = &ids[..ids.len().saturating_sub(1)];
                let chain = |block_tokens: u32| PromptChain {
                    block_tokens,
                    kv_dtype: KV_DTYPE,
                    hashes: self.hasher.chain(reused, block_tokens),
                };
                wanted.chains = sizes.into_iter().map(chain).collect();
                wanted.prompt_ids = Some(to_u32(ids.len()).max(1));
            }
            Ok(None) => {}
            Err(cause) => {
                tracing::debug!(id = %wanted.id, engine = engine.name(), cause, "token ids are not known");
                self.lock().read_from = self.env.now() + READ_AGAIN;
            }
        }
        wanted
    }

    /// An engine to ask for token ids, in rotation, and the sizes of blocks; none if it is of no use.
    fn reader(&self) -> Option<(Arc<dyn OutsideEngine>, BTreeSet<u32>)> {
        let now = self.env.now();
        let mut state = self.lock();
        if now < state.read_from {
            return None;
        }
        let seats = state.seats.iter().enumerate();
        let able: Vec<usize> = seats
            .filter(|(_, seat)| seat.instance.is_some() && !seat.rests && seat.cache.is_followed)
            .map(|(at, _)| at)
            .collect();
        let has_some = able.iter().any(|at| !state.seats[*at].cache.known.is_empty());
        let sizes = able.iter().map(|at| state.seats[*at].cache.block_tokens).filter(|size| *size > 0);
        let sizes: BTreeSet<u32> = sizes.collect();
        let turn = state.reads;
        state.reads = turn.wrapping_add(1);
        let at = *able.get(turn.checked_rem(able.len())?)?;
        has_some.then(|| (self.engine(at).clone(), sizes))
    }

    /// The known content of all engines' caches.
    pub(crate) fn caches(&self) -> Vec<CacheView> {
        let state = self.lock();
        let held = state.front.machine().held();
        let view = |(at, EngineSpec { engine, .. }): (usize, &EngineSpec)| {
            let cache = &state.seats[at].cache;
            CacheView {
                engine: engine.name().to_owned(),
                is_followed: cache.is_followed,
                block_tokens: cache.block_tokens,
                blocks: cache.known.keys().map(|(part, block)| (*part, block.0)).collect(),
                keys: held.get(&InstanceId(to_u32(at))).map_or(0, Vec::len),
            }
        };
        self.members.iter().map(|member| &member.spec).enumerate().map(view).collect()
    }
}

impl super::Fleetwide {
    /// Reports the known cache content of an engine that came up to the machine.
    pub(super) fn tell_cache(&mut self, at: usize) {
        let hashes = self.seats[at].cache.keys();
        if !hashes.is_empty() {
            let instance = InstanceId(to_u32(at));
            self.front.step(Event::KvStored { instance, hashes, tier: Tier::Device });
        }
    }
}

#[cfg(test)]
mod tests;
