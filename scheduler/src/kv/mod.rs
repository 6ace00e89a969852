//! Keys of KV blocks, the index of their holders, and the cache that decides evictions.

mod blocks;
pub mod cache;
pub mod hash;
pub mod index;
pub mod parts;
mod sets;
mod table;

pub use cache::{BlockCache, CachePolicy};
pub use hash::{BlockHash, Chain, Namespace, PrefixHasher};
pub use index::{Applied, Change, Prefix, PrefixIndex, Prefixes, Tier};
