//! Turns a checkpoint directory into commands: configuration, weights, tokens and the forward pass.

pub mod apart;
mod arena;
pub(crate) mod attention;
pub(crate) mod bind;
pub mod builtin;
mod byte_level;
pub mod chat;
pub mod config;
pub mod control;
pub mod digest;
pub mod divided;
pub mod draws;
pub mod error;
pub mod exchange;
mod expanded;
pub mod experts;
pub mod families;
mod family;
mod fields;
pub mod generation;
mod gguf;
pub mod graph;
mod header;
mod held;
mod in_place;
mod jinja;
pub mod latent;
pub mod leaving;
pub mod load;
mod made;
pub mod meeting;
mod names;
#[cfg(any(test, feature = "testing"))]
pub mod oracle;
mod parse;
pub mod peers;
mod place;
mod quantisation;
pub mod random;
mod repack;
mod rope;
mod rope_table;
mod schemes;
mod specials;
mod step;
pub mod stored;
mod strftime;
pub mod style;
mod template_limits;
mod tiktoken;
pub mod tokenizer;
mod tokenizer_config;
mod tool_style;
mod unread;
#[cfg(any(test, feature = "testing"))]
pub mod variants;
pub mod weights;
mod wrapped;

pub use chat::{ChatMessage, ChatTemplate, Conversation};
pub use config::ModelConfig;
pub use control::{ControlText, RenderedChat};
pub use error::{Error, Result};
pub use generation::GenerationDefaults;
pub use load::{Checkpoint, HostTensor};
#[cfg(any(test, feature = "testing"))]
pub use oracle::Oracle;
pub use random::RandomCheckpoint;
pub use strftime::utc_day;
pub use tokenizer::{TokenStream, Tokenizer};
pub use tool_style::{CallIds, CallMarks, ListMarks, ToolStyle};
pub use weights::{Tensor, Weights};

#[cfg(test)]
mod testing;
