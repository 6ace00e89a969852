//! From a checkpoint directory to commands: configuration, weights, tokens and the forward pass.

pub mod config;
pub mod weights;

pub use config::ModelConfig;
pub use weights::{LayerWeights, Tensor, Weights};
