//! A model's shape.

use super::{Experts, LatentAttention, LayerStyle, LinearAttention};
use crate::kv::parts::LayerPages;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::{DType, KvShape, RotaryPart, StoredAs, WeightFormat};
use serde::{Deserialize, Serialize};

/// The properties of a decoder-only transformer that determine its cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelShape {
    /// Length of the residual stream.
    pub hidden: u32,
    /// Length of the MLP's inner layer.
    pub intermediate: u32,
    /// Query heads.
    pub heads: u32,
    /// KV heads; divides `heads`. Has no meaning with latent attention.
    pub kv_heads: u32,
    /// Length of a head.
    pub head_dim: u32,
    /// Rows of the embedding and of the LM head.
    pub vocab: u32,
    /// Sliding window of each layer; one entry per layer.
    pub windows: Vec<Option<u32>>,
    /// Dtype of the weights.
    pub weight: DType,
    /// Dtype of the activations.
    pub activation: DType,
    /// Dtype of the KV pools.
    pub kv: DType,
    /// Tokens in a KV page.
    pub page_tokens: u32,
    /// Whether q, k and v have biases (Qwen2).
    #[serde(default)]
    pub qkv_bias: bool,
    /// Whether the attention output has a bias.
    #[serde(default)]
    pub o_bias: bool,
    /// Whether the MLP's projections have biases.
    #[serde(default)]
    pub mlp_bias: bool,
    /// Whether q and k are normalised per head before rope (Qwen3).
    #[serde(default)]
    pub qk_norm: bool,
    /// The rotated part of each head, unless it is all of it (GLM-4-MoE).
    #[serde(default)]
    pub rotary: Option<RotaryPart>,
    /// Whether each head of attention has a sink (gpt-oss).
    #[serde(default)]
    pub sinks: bool,
    /// What else its layers do.
    #[serde(default)]
    pub style: LayerStyle,
    /// The format of the layers' matrices, if they are not stored in `weight`.
    #[serde(default)]
    pub format: Option<WeightFormat>,
    /// Experts, if some layers have them instead of an MLP.
    #[serde(default)]
    pub experts: Option<Experts>,
    /// The lengths of latent attention, if that is what layers have.
    #[serde(default)]
    pub latent: Option<LatentAttention>,
    /// Linear attention, if some layers have it.
    #[serde(default)]
    pub linear: Option<LinearAttention>,
}

impl ModelShape {
    /// Number of decoder layers.
    pub fn layers(&self) -> u32 {
        to_u32(self.windows.len())
    }

    /// Its KV.
    pub fn kv_shape(&self) -> KvShape {
        let ModelShape { kv_heads, head_dim, page_tokens, kv: dtype, .. } = *self;
        self.latent.map_or(KvShape { kv_heads, head_dim, page_tokens, dtype, latent: None }, |latent| {
            self.latent_kv(&latent)
        })
    }

    fn kv_bytes_per_layer(&self) -> u64 {
        self.kv_shape().wire_token_bytes(self.kv)
    }

    /// KV bytes of one token over all layers that keep KV.
    pub fn kv_bytes_per_token(&self) -> u64 {
        u64::from(self.full_layers()) * self.kv_bytes_per_layer()
    }

    /// Whether steps of `other` are those of this model: only the size of KV pages may differ.
    pub fn computes_as(&self, other: &ModelShape) -> bool {
        ModelShape { page_tokens: other.page_tokens, ..self.clone() } == *other
    }

    /// The model on a device: one that has f16 units but no bf16 units runs it in f16.
    pub fn on(&self, profile: &DeviceProfile) -> ModelShape {
        let has = |dtype| profile.compute.iter().any(|(known, _)| *known == dtype);
        let f16_instead = !has(DType::Bf16) && has(DType::F16);
        let on = |dtype| if f16_instead && dtype == DType::Bf16 { DType::F16 } else { dtype };
        ModelShape {
            weight: on(self.weight),
            activation: on(self.activation),
            kv: on(self.kv),
            ..self.clone()
        }
    }

    /// The pages that its layers' KV is in where layers with a window give back what no token reads.
    pub fn window_pages(&self) -> LayerPages {
        let full = self.full_layers() as usize;
        LayerPages::of(self.windows.get(..full).unwrap_or(&self.windows), u32::MAX)
    }

    /// Bytes that a sequence of `tokens` tokens holds, in whole pages, where layers with a window give back
    /// what no token reads.
    pub fn sequence_bytes(&self, tokens: u32) -> u64 {
        self.sequence_bytes_in(&self.window_pages(), tokens)
    }

    /// The same where no page is given back before the sequence ends.
    pub fn whole_sequence_bytes(&self, tokens: u32) -> u64 {
        self.sequence_bytes_in(&LayerPages::whole(self.full_layers()), tokens)
    }

    /// Bytes of a sequence of `tokens` tokens that are sent to an instance that continues it and whose
    /// windowed layers keep only their window.
    pub fn sent_bytes(&self, tokens: u32) -> u64 {
        let held = self.window_pages().layer_tokens_held(tokens.into(), self.page_tokens);
        held * self.kv_bytes_per_layer() + self.state_bytes()
    }

    /// The same as [`ModelShape::sequence_bytes`] with its layers' KV in these pages.
    pub fn sequence_bytes_in(&self, pages: &LayerPages, tokens: u32) -> u64 {
        let held = pages.parts.pages_held(tokens.into(), self.page_tokens);
        held * pages.page_layer_tokens(self.page_tokens) * self.kv_bytes_per_layer() + self.state_bytes()
    }

    /// Copies of the KV among `devices` that share the model: a device has at least one KV head, all heads
    /// share the latents, and with whole experts on each device the sequences are divided.
    pub fn kv_copies(&self, devices: u32) -> f64 {
        if self.spread() > 1 {
            return 1.0;
        }
        (f64::from(devices) / f64::from(self.kv_shape().kv_heads)).max(1.0)
    }

    /// The same model with its layers' matrices in a format.
    pub fn stored_as(self, format: Option<WeightFormat>) -> Self {
        ModelShape { format, ..self }
    }

    /// How its layers' matrices are stored.
    pub fn stored(&self) -> StoredAs {
        self.format.map_or(StoredAs::Plain(self.weight), StoredAs::Quantised)
    }

    /// The same model with K and V in `kv`.
    pub fn with_kv(self, kv: DType) -> Self {
        ModelShape { kv, ..self }
    }

    /// The share of one of `devices` in tensor parallelism (Megatron-LM, arXiv 1909.08053). Heads, MLP and
    /// vocabulary are split, and each expert or their number; a device has at least one KV head, so with more
    /// than `kv_heads` devices KV is stored several times. With whole experts on each device everything else
    /// is whole too.
    pub fn split(&self, devices: u32) -> ModelShape {
        if self.spread() > 1 {
            return self.clone();
        }
        ModelShape {
            heads: self.heads / devices,
            kv_heads: (self.kv_heads / devices).max(1),
            intermediate: self.intermediate / devices,
            vocab: self.vocab.div_ceil(devices),
            experts: self.experts.map(|experts| experts.split(devices)),
            linear: self.linear.map(|linear| linear.split(devices)),
            ..self.clone()
        }
    }

    /// Checks that [`ModelShape::split`] is even; the error names the uneven dimension.
    pub fn check_split(&self, devices: u32) -> Result<(), String> {
        let even = |name: &str, count: u32| {
            if devices > 0 && count.is_multiple_of(devices) {
                return Ok(());
            }
            Err(format!("{count} {name} do not divide over {devices} devices"))
        };
        if let Some(experts) = self.experts.filter(|experts| experts.spread > 1) {
            return even("experts", experts.count);
        }
        if let Some(why) = self.style.undivided().filter(|_| devices > 1) {
            return Err(format!("{why} cannot be divided over {devices} devices"));
        }
        even("heads", self.heads)?;
        even("rows of the MLP", self.intermediate)?;
        if let Some(experts) = self.experts {
            match experts.by_member {
                true => even("experts", experts.count)?,
                false => even("rows of an expert", experts.intermediate)?,
            }
            even("rows of the shared experts", experts.shared)?;
        }
        if let Some(linear) = self.linear {
            even("key heads of linear attention", linear.key_heads)?;
        }
        if self.latent.is_some() {
            return Ok(());
        }
        if devices.is_multiple_of(self.kv_heads.max(1)) { Ok(()) } else { even("KV heads", self.kv_heads) }
    }
}
