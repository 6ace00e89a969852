//! Number of a model's weights, and their memory.

use super::ModelShape;
use mixfleet_hal::units::Bytes;

/// Elements of a model's matrices; norms and biases are less than a thousandth of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterCount {
    /// Embedding and LM head.
    pub tables: u64,
    /// Layers without their routed experts.
    pub shared: u64,
    /// Routed experts.
    pub routed: u64,
    /// Routed experts that a token goes through.
    pub routed_active: u64,
}

impl ParameterCount {
    /// All that must be in memory.
    pub fn resident(&self) -> u64 {
        self.tables + self.shared + self.routed
    }

    /// What one token goes through, with both tables.
    pub fn active(&self) -> u64 {
        self.tables + self.shared + self.routed_active
    }
}

impl ModelShape {
    /// Counts the elements of its matrices.
    pub fn parameters(&self, tied_embeddings: bool) -> ParameterCount {
        let n = u64::from;
        let [hidden, layers, full] = [self.hidden, self.layers(), self.full_layers()].map(n);
        let attention = match &self.latent {
            Some(latent) => latent.parameters(self.hidden, self.heads),
            None => {
                let gates = n(u32::from(self.linear.is_some_and(|linear| linear.gated)));
                let heads = (2 + gates) * n(self.heads) + 2 * n(self.kv_heads);
                hidden * n(self.head_dim) * heads
            }
        };
        let linear = self.linear.map_or(0, |linear| (layers - full) * linear.parameters(self.hidden));
        let [routed, routed_active, around] = self.expert_parameters();
        let plain = n(self.mlp_layers()[0]) * 3 * hidden * n(self.intermediate);
        let tables = if tied_embeddings { 1 } else { 2 };
        ParameterCount {
            tables: tables * n(self.vocab) * hidden,
            shared: full * attention + linear + plain + around,
            routed,
            routed_active,
        }
    }

    /// Bits of a weight of the layers.
    pub fn weight_bits(&self) -> f64 {
        self.format.map_or(8.0 * self.weight.size_bytes() as f64, |format| format.bits())
    }

    /// Elements of matrices that are made of a checkpoint's and stand beside them.
    fn key_elements(&self) -> u64 {
        self.latent.map_or(0, |latent| u64::from(self.layers()) * latent.key_elements(self.heads))
    }

    /// Memory of an instance for its weights. Where whole experts are divided over devices, each of these has
    /// everything else.
    pub fn weight_bytes(&self, tied_embeddings: bool) -> Bytes {
        let ParameterCount { tables, shared, routed, .. } = self.parameters(tied_embeddings);
        let plain = 8.0 * self.weight.size_bytes() as f64;
        let apart = self.experts.is_some_and(|experts| experts.quantised_alone);
        let beside = if apart { plain } else { self.weight_bits() };
        let each_device = tables as f64 * plain + (shared + self.key_elements()) as f64 * beside;
        Bytes((each_device * f64::from(self.spread()) + routed as f64 * self.weight_bits()) / 8.0)
    }
}
