//! What identifies a piece of KV cache, who holds it, and what goes when room is needed.

pub mod cache;
pub mod hash;
pub mod index;
#[expect(dead_code, reason = "the index is to use the rest")]
mod table;

pub use cache::{BlockCache, CachePolicy};
pub use hash::{BlockHash, Chain, Namespace, PrefixHasher};
pub use index::{BlockMap, PrefixIndex};
