//! Small GGUF files of families whose layers differ from Llama's: parsed keys and tensors.

use super::files_tests::Small;
use mixfleet_hal::RotaryPart;
use mixfleet_scheduler::layers::LayerRope;

const SEPARATE: [&str; 3] = ["attn_q", "attn_k", "attn_v"];

#[test]
fn multipliers_of_granite_are_read() {
    let file = Small::llama(&[])
        .of_architecture("granite")
        .float("granite.embedding_scale", 12.0)
        .float("granite.residual_scale", 0.5)
        .float("granite.attention.scale", 0.125)
        .float("granite.logit_scale", 8.0);
    let checkpoint = file.open("granite-keys").unwrap();
    let scales = checkpoint.config.scales;
    assert_eq!((scales.embedding, scales.last_norm, scales.score), (24.0, 0.125, 0.5));
    assert!((scales.stream_eps / 4e-5 - 1.0).abs() < 1e-6);
    // the last norm carries the divisor of logits
    let norm = checkpoint.values("model.norm.weight").expect("a norm");
    assert_eq!((norm[0], norm[1]), (0.5 / 8.0, f64::from((0.5f32 + 1.0 / 1024.0) / 8.0)));
    let bare = file.flag("granite.rope.scaling.finetuned", false).open("granite-bare").unwrap().config;
    assert!(bare.rope.inv_freq.iter().all(|frequency| *frequency == 0.0));
    let error = Small::llama(&[]).float("llama.residual_scale", 0.5).open("llama-scale").unwrap_err();
    assert!(error.to_string().contains("residual_scale"), "{error}");
}

#[test]
fn matrices_that_are_one_tensor_are_read_as_rows_of_it() {
    let mut file = Small::llama(&[]).of_architecture("phi3");
    for name in SEPARATE.iter().chain(&["ffn_gate", "ffn_up"]) {
        file = file.without(&format!("blk.0.{name}.weight"));
    }
    let file = file
        .tensor("blk.0.attn_qkv.weight", &[32, 96], 0.0)
        .tensor("blk.0.ffn_up.weight", &[32, 64], 0.0)
        .tensor("rope_factors_short.weight", &[4], 1.0)
        .tensor("rope_factors_long.weight", &[4], 2.0)
        .number("phi3.rope.dimension_count", 8)
        .number("phi3.rope.scaling.original_context_length", 48)
        .float("phi3.rope.scaling.attn_factor", 1.25)
        .number("phi3.attention.sliding_window", 7);
    let checkpoint = file.open("phi3-fused").unwrap();
    let first = |name: &str| checkpoint.values(&format!("model.layers.0.{name}.weight")).expect(name)[0];
    let row = |row: u32| f64::from(row * 32) / 1024.0;
    let found = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"];
    assert_eq!(found.map(first), [0, 32, 64, 0, 32].map(row));
    let config = &checkpoint.config;
    assert_eq!(config.rotary(), Some(RotaryPart { first: 0, length: 8, interleaved: false }));
    assert_eq!((config.context_max, config.rope.scale, config.windows[0]), (48, 1.25, None));
    assert!((config.rope.inv_freq[1] - 0.1 / (1.0 + 1.0 / 1024.0)).abs() < 1e-7);
}

#[test]
fn norms_behind_blocks_and_layers_without_rope_are_read() {
    let mut glm = Small::llama(&[]).of_architecture("glm4").number("glm4.rope.dimension_count", 8);
    for norm in ["post_attention_norm", "post_ffw_norm"] {
        glm = glm.tensor(&format!("blk.0.{norm}.weight"), &[32], 1.0);
    }
    let glm = glm.without("blk.0.ffn_gate.weight").tensor("blk.0.ffn_up.weight", &[32, 64], 0.0);
    let config = glm.open("glm4-norms").unwrap().config;
    assert!(config.style.has_post_norms());
    assert_eq!(config.rotary(), Some(RotaryPart { first: 0, length: 8, interleaved: true }));
    let sections = glm.number("glm4.rope.dimension_sections", 4).open("glm4-sections").unwrap_err();
    assert!(sections.to_string().contains("rope.dimension_sections"), "{sections}");
    let smollm = Small::llama(&[]).of_architecture("smollm3").open("smollm3").unwrap().config;
    assert_eq!(smollm.style.ropes, [LayerRope::Main]);
}

#[test]
fn tokens_without_a_text_may_repeat_and_others_may_not() {
    let checkpoint = Small::llama(&["", ""]).open("tokens-empty").unwrap();
    assert_eq!(checkpoint.config.vocab, 16);
    let error = Small::llama(&["x", "x"]).open("tokens-equal").unwrap_err().to_string();
    assert!(error.contains("tokens 14 and 15 are both"), "{error}");
}

#[test]
fn unread_keys_of_attention_rope_and_experts_are_refused() {
    let refused = |name: &str, file: Small| {
        let error = file.open("unread-key").unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("not supported"), "{name}: {error}");
    };
    // a number of one has an effect too
    for (name, value) in [
        ("attention.scale", 1.0),
        ("attention.temperature_scale", 0.1),
        ("attn_logit_softcapping", 1.0),
        ("final_logit_softcapping", 30.0),
        ("attention.of_a_later_file", 2.0),
        ("rope.scaling.of_a_later_file", 2.0),
        ("expert_of_a_later_file", 2.0),
    ] {
        refused(name, Small::llama(&[]).float(&format!("llama.{name}"), value));
    }
    Small::llama(&[]).float("llama.attention.of_a_later_file", 0.0).open("neutral-key").unwrap();
}

#[test]
fn soft_caps_and_windows_of_gemma_are_read() {
    let gemma = |name: &str| {
        let mut file =
            Small::llama(&[]).of_architecture(name).number(&format!("{name}.attention.sliding_window"), 7);
        for norm in ["post_attention_norm", "post_ffw_norm"] {
            file = file.tensor(&format!("blk.0.{norm}.weight"), &[32], 1.0);
        }
        file
    };
    let second = gemma("gemma2").float("gemma2.attn_logit_softcapping", 20.0).open("gemma2").unwrap().config;
    assert_eq!((second.scales.score_cap, second.scales.logit_cap), (Some(20.0), Some(30.0)));
    assert_eq!((second.windows[0], second.layout.offset_norms), (Some(7), false));
    let third = gemma("gemma3")
        .float("gemma3.final_logit_softcapping", 25.0)
        .float("gemma3.rope.freq_base_swa", 5000.0)
        .tensor("blk.0.attn_q_norm.weight", &[16], 1.0)
        .tensor("blk.0.attn_k_norm.weight", &[16], 1.0);
    let config = third.open("gemma3").unwrap().config;
    assert_eq!((config.scales.score_cap, config.scales.logit_cap), (None, Some(25.0)));
    assert!(config.style.has_second_rope());
    let error =
        third.float("gemma3.attn_logit_softcapping", 50.0).open("gemma3-cap").unwrap_err().to_string();
    assert!(error.contains("attn_logit_softcapping"), "{error}");
}
