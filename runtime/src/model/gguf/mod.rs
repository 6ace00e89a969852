//! GGUF files as checkpoints: configuration, tokenizer and chat template are inside, weights mostly in blocks
//! of codes and scales (the format of ggml, `docs/gguf.md` there).

mod blocks;
mod config;
mod file;
mod grids;
mod kinds;
mod model;
mod pre;
mod text;

pub(super) use config::{architectures_of, config};
pub(super) use file::{GgufFile, is_gguf};
pub(super) use model::open;
pub(super) use text::{template, tokenizer};

#[cfg(test)]
mod families_tests;
#[cfg(test)]
mod files_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod vocabulary_tests;
