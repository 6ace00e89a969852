//! Finds unread tensors of a checkpoint's files: an unread one is an error, since answers would be another
//! model's.

use super::config::ModelConfig;
use super::{names, stored, wrapped};
use std::borrow::Cow;
use std::collections::HashSet;

/// Names of a quantised module's arrays, and of numbers beside them without effect here: activations and KV
/// are not quantised.
const ARRAYS: [&str; 18] = [
    "weight_scale",
    "weight_scale_inv",
    "weight_packed",
    "weight_zero_point",
    "weight_global_scale",
    "weight_shape",
    "weight_g_idx",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "input_scale",
    "input_global_scale",
    "input_zero_point",
    "activation_scale",
    "k_scale",
    "v_scale",
    "output_scale",
];
/// Of these names, those that stand for scales of KV: files without quantised matrices have them too.
const OF_KV: [&str; 3] = ["k_scale", "v_scale", "output_scale"];
/// Such names for the matrices of all experts together.
const FUSED: [&str; 2] = ["_blocks", "_scales"];
/// Ends of the names of tensors that follow from the configuration: frequencies, and positions and causal
/// masks of earlier versions of transformers.
const DERIVED: [&str; 8] = [
    ".inv_freq",
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
    ".attn.masked_bias",
    ".self_attn.k_scale",
    ".self_attn.v_scale",
    ".self_attn.kv_scale",
    ".self_attn.attn.kv_scale",
];

/// The tensors that a model reads.
pub(super) struct ReadTensors {
    planned: HashSet<String>,
    /// First layer of those that only draft tokens, where the configuration has some; none of these are read.
    drafts: Option<u32>,
    tied: bool,
    /// Whether matrices may have further arrays.
    quantised: bool,
    /// Whether the model is inside a multimodal one.
    wrapped: bool,
}

impl ReadTensors {
    /// The tensors of a model, optionally with draft layers after its own, and optionally inside a multimodal
    /// model.
    pub(super) fn of(config: &ModelConfig, drafts: bool, wrapped: bool) -> Self {
        let planned = stored::stored_tensors(config).into_iter().map(|(tensor, _)| tensor.name).collect();
        ReadTensors {
            planned,
            drafts: drafts.then_some(config.layers),
            tied: config.tied_embeddings,
            quantised: config.format.is_some(),
            wrapped,
        }
    }

    /// The name of a stored tensor in this model; none if another part of the whole model has it.
    pub(super) fn text_name<'a>(&self, name: &'a str) -> Option<Cow<'a, str>> {
        if self.wrapped { wrapped::text_name(name) } else { Some(Cow::Borrowed(name)) }
    }

    /// Whether the model needs a tensor.
    pub(super) fn needs(&self, name: &str) -> bool {
        let Some(name) = self.text_name(name) else { return false };
        let name = name.as_ref();
        if self.planned.contains(name) {
            return true;
        }
        let fused = FUSED.iter().filter_map(|end| name.strip_suffix(end));
        let module = name
            .rsplit_once('.')
            .filter(|(_, array)| ARRAYS.contains(array) && (self.quantised || OF_KV.contains(array)));
        fused.into_iter().any(|matrix| self.quantised && self.planned.contains(matrix))
            || module.is_some_and(|(module, _)| self.planned.contains(&format!("{module}.weight")))
    }

    /// Whether answers are the same without a tensor of any content.
    pub(super) fn lacks_nothing_without(&self, name: &str) -> bool {
        !self.needs(name) && self.leaves_out(name, &[1])
    }

    /// Whether answers are the same without a tensor that the model does not need.
    pub(super) fn leaves_out(&self, name: &str, bytes: &[u8]) -> bool {
        let Some(name) = self.text_name(name) else { return true };
        let name = name.as_ref();
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        let layer = layer.and_then(|(layer, _)| layer.parse::<u32>().ok());
        let is_draft = layer.zip(self.drafts).is_some_and(|(layer, first)| layer >= first);
        let is_tied = self.tied && name == names::LM_HEAD;
        // GPTQ files have biases of zeros
        let is_zero = name.ends_with(".bias") && bytes.iter().all(|byte| *byte == 0);
        is_draft || is_tied || is_zero || DERIVED.iter().any(|end| name.ends_with(end))
    }
}

#[cfg(test)]
mod tests {
    use super::super::variants::tiny_variants;
    use super::*;

    #[test]
    fn what_is_left_out_changes_no_answer() {
        let variants = tiny_variants();
        let (_, random) = variants.iter().find(|(name, _)| *name == "qwen2").expect("a variant");
        let config = random.model_config().expect("a configuration");
        let plain = ReadTensors::of(&config, false, false);
        assert!(!plain.needs("model.layers.1.mlp.up_proj.weight_scale"), "nothing is quantised");
        assert!(plain.needs("model.layers.1.self_attn.k_proj.k_scale"));
        assert!(!plain.lacks_nothing_without("model.layers.0.self_attn.o_proj.bias"), "it may not be zero");
        let read = ReadTensors { quantised: true, ..plain };
        for name in [
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.1.mlp.up_proj.weight_scale",
            "model.layers.2.mlp.down_proj.qzeros",
        ] {
            assert!(read.needs(name), "{name}");
        }
        let ones = [0, 0, 128, 63];
        for (name, bytes, is_left_out) in [
            ("lm_head.weight", &ones, true),
            ("model.layers.0.self_attn.rotary_emb.inv_freq", &ones, true),
            ("model.layers.0.self_attn.o_proj.bias", &[0; 4], true),
            ("model.layers.0.self_attn.o_proj.bias", &ones, false),
            ("model.layers.0.post_feedforward_layernorm.weight", &[0; 4], false),
            ("model.layers.3.input_layernorm.weight", &ones, false),
        ] {
            assert!(!read.needs(name), "{name}");
            assert_eq!(read.leaves_out(name, bytes), is_left_out, "{name}");
        }
        let drafting = ReadTensors::of(&config, true, false);
        assert!(drafting.leaves_out("model.layers.3.eh_proj.weight", &ones));
    }
}
