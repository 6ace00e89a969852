//! Shapes of well-known models, so that devices can be compared without a checkpoint.

mod dense;
mod mixtures;

use crate::cost::{Experts, LatentAttention, LinearAttention, ModelShape, ParameterCount};
use crate::layers::{LayerRope, LayerStyle, NormPlacement};
use mixfleet_hal::catalog::{closest_names, names_that_begin};
use mixfleet_hal::units::Bytes;
use mixfleet_hal::{DType, StoredAs, WeightFormat};

/// A decoder-only transformer, with its published configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KnownModel {
    /// The model's name, matched without regard to case.
    pub name: &'static str,
    /// The repository on Hugging Face whose `config.json` has these numbers.
    pub repository: &'static str,
    /// Number of parameters, in billions, as published or counted from the configuration by others.
    pub parameters_b: f64,
    /// Published number of parameters that a token goes through, in billions. Publishers differ by whether
    /// they count embeddings.
    pub active_b: f64,
    /// Longest sequence that the configuration allows, in tokens.
    pub context: u32,
    /// Decoder layers.
    pub layers: u32,
    /// Length of the residual stream.
    pub hidden: u32,
    /// Length of the MLP's inner layer.
    pub intermediate: u32,
    /// Query heads.
    pub heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Length of a head.
    pub head_dim: u32,
    /// Rows of the embedding and of the LM head.
    pub vocab: u32,
    /// Sliding windows, if it has them.
    pub windows: Option<Windows>,
    /// Whether the LM head is the embedding.
    pub tied_embeddings: bool,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether q and k are normalised per head.
    pub qk_norm: bool,
    /// Experts, if some layers have them instead of an MLP.
    pub experts: Option<Experts>,
    /// Latent attention, if layers have it.
    pub latent: Option<LatentAttention>,
    /// Linear attention, if some layers have it.
    pub linear: Option<LinearAttention>,
}

/// Layers with a sliding window among layers without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Keys that a query attends to.
    pub tokens: u32,
    /// The last of this many consecutive layers has no window; 0 means that every layer has one.
    pub period: u32,
}

/// A dense model from its name and `[layers, hidden, intermediate, heads, kv_heads, head_dim, vocab]`.
const fn dense(name: &'static str, parameters_b: f64, numbers: [u32; 7]) -> KnownModel {
    let [layers, hidden, intermediate, heads, kv_heads, head_dim, vocab] = numbers;
    KnownModel {
        name,
        repository: "",
        parameters_b,
        active_b: parameters_b,
        context: 0,
        layers,
        hidden,
        intermediate,
        heads,
        kv_heads,
        head_dim,
        vocab,
        windows: None,
        tied_embeddings: false,
        qkv_bias: false,
        qk_norm: false,
        experts: None,
        latent: None,
        linear: None,
    }
}

impl KnownModel {
    const fn named(self, name: &'static str) -> Self {
        KnownModel { name, ..self }
    }
    const fn of(self, repository: &'static str, context: u32) -> Self {
        KnownModel { repository, context, ..self }
    }
    const fn experts(self, active_b: f64, experts: Experts) -> Self {
        KnownModel { active_b, experts: Some(experts), ..self }
    }
    const fn latent(self, latent: LatentAttention) -> Self {
        KnownModel { latent: Some(latent), ..self }
    }
    const fn linear(self, linear: LinearAttention) -> Self {
        KnownModel { linear: Some(linear), ..self }
    }
    const fn tied(self) -> Self {
        KnownModel { tied_embeddings: true, ..self }
    }
    const fn biased(self) -> Self {
        KnownModel { qkv_bias: true, ..self }
    }
    const fn normed(self) -> Self {
        KnownModel { qk_norm: true, ..self }
    }
    const fn windows(self, tokens: u32, period: u32) -> Self {
        KnownModel { windows: Some(Windows { tokens, period }), ..self }
    }
}

/// Known models that this project's runtime does not serve, and why.
const UNSERVED: &[(&str, &str)] = &[
    ("llama-4-maverick", "its windows are chunks, and some layers have no positions"),
    ("llama-4-scout", "its windows are chunks, and some layers have no positions"),
    ("qwen3-next-80b-a3b", "it has linear attention"),
    ("qwen3.5-35b-a3b", "it has linear attention"),
    ("qwen3.5-397b-a17b", "it has linear attention"),
];

/// Tokens per KV page of these shapes; it affects little but the cost of a page table.
const PAGE_TOKENS: u32 = 16;

impl KnownModel {
    /// Counts the parameters of the matrices.
    pub fn parameters(&self) -> ParameterCount {
        self.shape(DType::Bf16).parameters(self.tied_embeddings)
    }

    /// Memory for the weights.
    pub fn weight_bytes(&self, stored: StoredAs) -> Bytes {
        self.shape_as(stored).weight_bytes(self.tied_embeddings)
    }

    /// Why this project's runtime does not serve it; `None` if it does.
    pub fn unserved(&self) -> Option<&'static str> {
        UNSERVED.iter().find(|(name, _)| *name == self.name).map(|(_, why)| *why)
    }

    /// Whether every layer is attention with keys and values of its heads, and one MLP for all tokens.
    pub fn is_plain(&self) -> bool {
        self.experts.is_none() && self.latent.is_none() && self.linear.is_none()
    }

    /// The model's shape with its weights stored so, and KV as is usual with them.
    pub fn shape_as(&self, stored: StoredAs) -> ModelShape {
        self.shape(stored.plain()).stored_as(stored.format()).with_kv(stored.kv())
    }

    /// The layers' style: that of Gemma 3, or of Llama.
    fn style(&self) -> LayerStyle {
        if !self.repository.starts_with("google/gemma-3") {
            return LayerStyle::default();
        }
        let is_windowed = |layer: u32| self.windows.is_some_and(|of| !(layer + 1).is_multiple_of(of.period));
        let rope = |layer| if is_windowed(layer) { LayerRope::Second } else { LayerRope::Main };
        LayerStyle {
            norms: NormPlacement::Around,
            gelu: true,
            ropes: (0..self.layers).map(rope).collect(),
            ..LayerStyle::default()
        }
    }

    /// The model's shape with weights, activations and KV in `dtype`; of 8-bit floats, only the matrices of
    /// the layers and KV.
    pub fn shape(&self, dtype: DType) -> ModelShape {
        let format = (dtype == DType::F8E4m3).then_some(WeightFormat::Fp8);
        let plain = if format.is_some() { DType::Bf16 } else { dtype };
        let window = |layer: u32| {
            let Windows { tokens, period } = self.windows?;
            (!(layer + 1).is_multiple_of(period)).then_some(tokens)
        };
        ModelShape {
            hidden: self.hidden,
            intermediate: self.intermediate,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            vocab: self.vocab,
            windows: (0..self.layers).map(window).collect(),
            weight: plain,
            activation: plain,
            kv: dtype,
            page_tokens: PAGE_TOKENS,
            qkv_bias: self.qkv_bias,
            o_bias: false,
            mlp_bias: false,
            qk_norm: self.qk_norm,
            // rotating part of a head costs as much as all of it, within the precision of any profile
            rotary: None,
            sinks: false,
            style: self.style(),
            format,
            experts: self.experts,
            latent: self.latent,
            linear: self.linear,
        }
    }
}

/// All known models, by family and size: dense ones, then mixtures of experts.
pub fn models() -> impl Iterator<Item = &'static KnownModel> {
    dense::MODELS.iter().chain(mixtures::MODELS)
}

/// Parts of repository names that say how a model was tuned or who tuned it, and nothing of its shape.
const NOT_OF_SHAPE: [&str; 6] = ["base", "chat", "hf", "instruct", "it", "meta"];

/// Whether a repository of the Hub, of any owner, has this model or a tuned version of it.
fn is_of_repository(model: &KnownModel, asked: &str) -> bool {
    let shape_of = |repository: &str| {
        let name = repository.rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
        let words = name.split('-').filter(|word| !NOT_OF_SHAPE.contains(word));
        words.collect::<Vec<_>>().join("-")
    };
    let asked = shape_of(asked);
    asked == shape_of(model.repository) || asked == model.name
}

/// The model that a user means, by its name in any case, a repository of the Hugging Face Hub, or the
/// beginning of one name alone.
///
/// # Errors
/// [`UnknownModel`], with the models of a family, or similar names.
pub fn find(name: &str) -> Result<&'static KnownModel, UnknownModel> {
    if let Some(model) = models().find(|model| model.name.eq_ignore_ascii_case(name)) {
        return Ok(model);
    }
    if let Some(model) = models().find(|model| is_of_repository(model, name)) {
        return Ok(model);
    }
    if let Some((name, why)) = mixtures::UNPRICED.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)) {
        return Err(UnknownModel::Unpriced { name, why });
    }
    match &names_that_begin(name, models().map(|model| model.name))[..] {
        [] => {}
        [only] => return find(only),
        several => {
            return Err(UnknownModel::Several { name: name.into(), models: several.join(", ") });
        }
    }
    let closest = closest_names(name.rsplit('/').next().unwrap_or(name), models().map(|model| model.name));
    if closest.is_empty() {
        return Err(UnknownModel::Nothing(name.into()));
    }
    Err(UnknownModel::Closest { name: name.into(), closest: closest.join(", ") })
}

/// Why a name has no shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnknownModel {
    /// The model is known, and its attention has no cost yet.
    #[error("the cost of '{name}' is not known: {why}")]
    Unpriced {
        /// Its name.
        name: &'static str,
        /// Special properties of the architecture.
        why: &'static str,
    },
    /// A family of several models.
    #[error("'{name}' may be any of {models}; name one")]
    Several {
        /// The requested name.
        name: String,
        /// The models whose names begin with it, separated by commas.
        models: String,
    },
    /// Other models have similar names.
    #[error("no model is called '{name}'; closest: {closest}")]
    Closest {
        /// The requested name.
        name: String,
        /// Similar names, separated by commas.
        closest: String,
    },
    /// No known name is similar.
    #[error("no model is called '{0}'; give a name such as llama-3.1-8b or a checkpoint directory")]
    Nothing(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_the_published_ones() {
        for model in models() {
            let counted = model.parameters().resident() as f64 / 1e9;
            let KnownModel { name, parameters_b, active_b, .. } = model;
            assert!((counted / parameters_b - 1.0).abs() < 0.01, "{name}: {counted} against {parameters_b}");
            // publishers leave out one embedding, or both, or round to a whole billion
            let tables = model.parameters().tables as f64 / 1e9;
            let active = model.parameters().active() as f64 / 1e9;
            assert!((active - tables) * 0.95 < *active_b, "{name}: {active} against {active_b}");
            assert!(active * 1.02 > *active_b, "{name}: {active} against {active_b}");
        }
        assert!(models().count() >= 45);
    }

    #[test]
    fn names_are_found_in_any_case_and_others_explained() {
        assert_eq!(find("LLaMA-3.1-8B").unwrap().layers, 32);
        assert_eq!(find("Mixtral-8x7B").unwrap().experts.unwrap().count, 8);
        assert!(UNSERVED.iter().all(|(name, _)| find(name).is_ok()));
        for id in
            ["meta-llama/Llama-3.1-8B-Instruct", "unsloth/Meta-Llama-3.1-8B", "NousResearch/llama-3.1-8b"]
        {
            assert_eq!(find(id).unwrap().name, "llama-3.1-8b", "{id}");
        }
        assert_eq!(find("mistralai/Mixtral-8x22B-Instruct-v0.1").unwrap().name, "mixtral-8x22b");
        // the repository says how its weights are stored, which the name alone would lose
        assert!(find("Qwen/Qwen3-8B-FP8").is_err());
        let family = find("qwen3").unwrap_err().to_string();
        assert!(family.contains("qwen3-0.6b, ") && family.ends_with("; name one"), "{family}");
        assert!(find("GLM-5").unwrap_err().to_string().contains("by an index"));
        assert_eq!(find("llama3.1-8b").unwrap().name, "llama-3.1-8b");
        let error = find("llama3.1-9b").unwrap_err().to_string();
        assert!(error.contains("closest: llama-3.1-8b"), "{error}");
        assert!(find("zz").unwrap_err().to_string().contains("checkpoint directory"));
        let names: std::collections::HashSet<&str> = models().map(|model| model.name).collect();
        assert_eq!(names.len(), models().count());
        assert!(models().all(|model| model.context > 0 && model.repository.contains('/')));
    }

    #[test]
    fn shapes_have_the_published_kv_and_windows() {
        let kv = |name: &str| find(name).unwrap().shape(DType::Bf16).kv_bytes_per_token();
        assert_eq!([kv("llama-3.1-8b"), kv("llama-3.1-70b"), kv("qwen3-32b")], [131_072, 327_680, 262_144]);
        assert_eq!([kv("deepseek-v3"), kv("kimi-k2"), kv("gpt-oss-120b")], [70_272, 70_272, 73_728]);
        let gemma = find("gemma-3-27b").unwrap().shape(DType::Bf16);
        let full = gemma.windows.iter().filter(|window| window.is_none()).count();
        assert_eq!((gemma.windows.len(), full), (62, 10));
    }

    /// A quarter of the layers keeps KV; the others keep 2 MiB of state and what a convolution remembers.
    #[test]
    fn linear_attention_keeps_a_state_and_no_kv() {
        let shape = find("qwen3.5-35b-a3b").unwrap().shape(DType::Bf16);
        assert_eq!(shape.kv_bytes_per_token(), 10 * 2 * 2 * 256 * 2);
        assert_eq!(shape.state_bytes(), 30 * 4 * (32 * 128 * 128 + 3 * 8192));
        assert_eq!(shape.sequence_bytes(1000), 1008 * shape.kv_bytes_per_token() + shape.state_bytes());
    }

    /// The files of gpt-oss-120b (experts in mxfp4, the rest in bf16) have 65.2 GB; those of Llama-3.1-70B
    /// 141.1 GB, and in AWQ's int4 39.8 GB.
    #[test]
    fn weights_take_what_published_files_have() {
        let gb = |name: &str, stored: &str| find(name).unwrap().weight_bytes(stored.parse().unwrap()).0 / 1e9;
        assert!((gb("gpt-oss-120b", "mxfp4") / 65.2 - 1.0).abs() < 0.01, "{}", gb("gpt-oss-120b", "mxfp4"));
        assert!((gb("llama-3.1-70b", "bf16") / 141.1 - 1.0).abs() < 0.01);
        assert!((gb("llama-3.1-70b", "int4") / 39.8 - 1.0).abs() < 0.01, "{}", gb("llama-3.1-70b", "int4"));
    }
}
