//! What identifies a piece of KV cache, and who holds it.

pub mod hash;
pub mod index;

pub use hash::{BlockHash, Chain, Namespace, PrefixHasher};
pub use index::{BlockMap, PrefixIndex};
