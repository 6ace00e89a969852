//! What identifies a piece of KV cache, who holds it, and what goes when room is needed.

mod blocks;
pub mod cache;
pub mod hash;
pub mod index;
mod sets;
mod table;

pub use cache::{BlockCache, CachePolicy};
pub use hash::{BlockHash, Chain, Namespace, PrefixHasher};
pub use index::{Applied, Change, Prefix, PrefixIndex, Prefixes, Tier};
