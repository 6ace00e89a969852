//! GGUF files as checkpoints: configuration, tokenizer and chat template are inside, weights mostly in blocks
//! of codes and scales (the format of ggml, `docs/gguf.md` there).

mod file;
mod model;
mod text;

pub(super) use file::{GgufFile, is_gguf};
pub(super) use model::{config, open};
pub(super) use text::{template, tokenizer};

#[cfg(test)]
mod tests;
