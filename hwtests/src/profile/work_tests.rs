use super::*;
use proptest::prelude::*;

const NAMES: [&str; 28] = [
    "gemm.bf16.m512.n4096.k4096",
    "gemm.f32.m1.n2048.k5632.acc",
    "gemm.bf16.m1.n32000.k2048.logits",
    "gemm.f8e4m3.m64.n4096.k4096",
    "attn_decode.bf16.b16.c16384.gqa4",
    "attn_decode.f16.b1.c512.gqa8.kv4.d64",
    "attn_prefill.bf16.t512.c0.gqa4",
    "attn_decode.bf16.b16.c2048.gqa128.kv1.d576.latent512",
    "attn_prefill.bf16.t512.c2048.gqa16.kv1.d576.latent512",
    "rms_norm.bf16.t8.h4096",
    "rope.bf16.t8.heads32.d64",
    "embed.bf16.t8.v32000.h2048",
    "kv_gather.bf16.t16.kv8.d128",
    "silu_mul.bf16.e4096",
    "clamped_swiglu.bf16.e4096",
    "gelu_mul.bf16.e4096",
    "soft_cap.f32.e4096",
    "route.f32.t8.e128.a8",
    "grouped_gemm.bf16.r64.fan8.e16.touched2.n768.k2048",
    "combine.bf16.t8.a8.h2048",
    "sample.f32.t8.v128256",
    "attn_merge.bf16.p1.t32.d64",
    "memory_read.512MiB",
    "copy_h2d.4KiB",
    "copy_d2d.100B",
    "launch.empty",
    "launch.replay100",
    "sustained.gemm",
];

#[test]
fn names_are_stable() {
    for name in NAMES {
        let work = WorkItem::parse(name, 32).unwrap_or_else(|| panic!("{name}"));
        assert_eq!(work.id(), name);
        if let WorkItem::Op(sig) = work {
            assert_eq!(sig.check(), Ok(()), "{name}");
        }
    }
}

#[test]
fn what_is_no_name_is_none() {
    for wrong in [
        "gemm",
        "gemm.bf16",
        "gemm.bf16.m0.n1.k1",
        "gemm.bf16.m1.n1.k1.z3",
        "gemm.bf16.k1.n1.m1",
        "gemm.int4.m1.n1.k1",
        "gemm.bfloat16.m1.n1.k1",
        "gemm.bf16.m99999999999.n1.k1",
        "attn_decode.bf16.b1.c1.gqa4294967295",
        "attn_decode.bf16.b1.c1.gqa4.kv2.d64.latent32",
        "attn_decode.bf16.b1.c1.gqa4.kv1.d64.latent65",
        "rope.bf16.t1.heads1.d3",
        "memory_read.0MiB",
        "memory_read.1024KiB",
        "memory_read.99999999999999GiB",
        "launch.commands",
        "sustained.",
        "",
        "..",
    ] {
        assert_eq!(WorkItem::parse(wrong, 32), None, "{wrong}");
    }
}

#[test]
fn patterns_name_groups_and_globs() {
    let work = WorkItem::parse("gemm.bf16.m512.n4096.k4096", 32).unwrap();
    for yes in ["gemm", "gemm.*", "*", "gemm.bf16.m512.n4096.k4096", "*.m512.*", "g*m.*k4096"] {
        assert!(matches(yes, &work), "{yes}");
    }
    for no in ["gem", "gemm.f32*", "*k409", "decode", "attention", "", "*m512*m512*"] {
        assert!(!matches(no, &work), "{no}");
    }
    assert!(matches("attention", &WorkItem::parse("attn_prefill.bf16.t512.c0.gqa4", 32).unwrap()));
}

proptest! {
    #[test]
    fn any_text_is_a_name_or_none(text in "[a-z_]{1,12}(\\.[a-z]{1,6}[0-9]{0,11}){0,5}") {
        if let Some(work) = WorkItem::parse(&text, 16) {
            prop_assert_eq!(work.id(), text);
        }
    }

    #[test]
    fn sizes_are_read_back(bytes in 1u64..1 << 50) {
        prop_assert_eq!(parse_size(&size(bytes)), Some(bytes));
    }
}
