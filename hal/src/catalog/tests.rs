use super::*;
use crate::{KvShape, OpSig};

#[test]
fn ids_are_unique_and_found_in_any_case() {
    let mut ids: Vec<String> = parts().iter().map(|part| part.id.to_ascii_lowercase()).collect();
    let count = ids.len();
    assert!(count >= 60, "{count} parts");
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), count);
    assert_eq!(part("rtx-4090").map(|p| p.id), Some("RTX-4090"));
    assert_eq!(part("h100-sxm-80gb").map(|p| p.id), Some("H100-SXM-80GB"));
    assert_eq!(part("RTX-4091"), None);
    assert_eq!(closest("rtx-4091")[0], "RTX-4090");
}

/// What no part of these years can be: a slip of the pen is a factor of ten or two columns swapped.
#[test]
fn numbers_are_of_a_sane_size() {
    for part in parts() {
        let id = part.id;
        let Rates { f32, bf16, f16, f16_accumulate_f16, fp8, fp4, int8 } = part.rates;
        assert!((2015..=2026).contains(&part.year), "{id}: {}", part.year);
        assert!((8.0..=2000.0).contains(&part.memory.size_gb), "{id}");
        assert!((200.0..=10_000.0).contains(&part.memory.bandwidth_gb_s), "{id}");
        assert!(part.power_w.is_none_or(|w| (40.0..=1500.0).contains(&w)), "{id}");
        assert!(bf16.or(f16).is_some(), "{id} has no matrix rate");
        assert!(!part.sources.is_empty() && part.name.starts_with(part.vendor), "{id}");
        let at_most = |less: Option<f64>, more: Option<f64>, factor: f64| match (less, more) {
            (Some(less), Some(more)) => less <= more * factor,
            _ => true,
        };
        let half = bf16.or(f16);
        assert!(at_most(f32, half, 1.01), "{id}: vectors above matrices");
        assert!(at_most(half, fp8, 1.01) && at_most(fp8, half, 4.1), "{id}: fp8");
        assert!(at_most(fp8, fp4, 1.01) && at_most(fp4, fp8, 4.1), "{id}: fp4");
        assert!(at_most(int8, half, 4.1), "{id}: int8");
        assert!(at_most(f16_accumulate_f16, f16, 2.1), "{id}: f16 with f16 accumulation");
        // Machine balance of bf16: from 26 FLOP per byte on an MI50 to 745 on a Xeon with AMX.
        let balance = half.unwrap_or_default() * 1e3 / part.memory.bandwidth_gb_s;
        assert!((10.0..=800.0).contains(&balance), "{id}: {balance} FLOP/B");
    }
}

#[test]
fn a_profile_is_the_datasheet_and_says_so() {
    let part = part("RTX-4090").unwrap();
    let profile = part.profile();
    assert_eq!(profile.bandwidth, BytesPerSecond(1008e9));
    assert_eq!(profile.memory, Bytes(24e9));
    assert!(profile.compute.contains(&(DType::Bf16, FlopPerSecond(165.2e12))));
    assert!(profile.points.is_empty());
    assert!(is_claim(&profile));
    let fitted = DeviceProfile { fingerprint: "AMD EPYC, 2 units".into(), ..profile };
    assert!(!is_claim(&fitted));
}

fn decode_of_48() -> OpSig {
    OpSig::AttnDecode {
        sequences: 48,
        kv_tokens: 48 * 4096,
        heads: 64,
        pages_max: 256,
        x: DType::Bf16,
        kv: KvShape { kv_heads: 8, head_dim: 128, page_tokens: 16, dtype: DType::Bf16, latent: None },
        cap: None,
    }
}

#[test]
fn the_reached_profile_is_slower_by_the_published_share() {
    // a part of which only shares are published
    let part = part("ARC-PRO-B60").unwrap();
    let (claimed, reached) = (part.profile(), part.reached_profile().unwrap());
    let share = claimed.time(&decode_of_48()) / reached.time(&decode_of_48());
    assert!((share - 0.945).abs() < 0.01, "{share}");
    assert!(is_claim(&reached));
    assert!(super::part("MI300X").unwrap().reached_profile().is_none());
}

#[test]
fn the_law_of_a_part_agrees_with_its_published_share() {
    for id in ["A100-SXM-80GB", "H100-SXM-80GB", "H200-SXM-141GB", "L40S", "RTX-PRO-6000-SE", "RTX-4090"] {
        let part = part(id).unwrap();
        let reached = part.reached_profile().unwrap().time(&decode_of_48());
        let share = part.profile().time(&decode_of_48()) / reached / part.reached().unwrap().attention_decode;
        // the A100's law, 9 % off on average, is 17 % too fast here
        let most = if id == "A100-SXM-80GB" { 0.18 } else { 0.15 };
        assert!((share - 1.0).abs() < most, "{id}: {share}");
    }
}

#[test]
fn every_published_share_belongs_to_a_part_and_is_a_share() {
    for part in parts() {
        let Some(reached) = part.reached() else { continue };
        let shares = [reached.attention_decode, reached.gemm, reached.gemm_few_rows];
        assert!(shares.iter().all(|share| (0.3..=1.0).contains(share)), "{}", part.id);
    }
    assert_eq!(parts().iter().filter(|part| part.reached().is_some()).count(), 11);
}

fn product_of_few_rows(dtype: DType) -> OpSig {
    let out = DType::Bf16;
    OpSig::Gemm { m: 8, n: 8192, k: 8192, x: dtype, weight: dtype, out, bias: false, accumulate: false }
}

#[test]
fn few_sms_stream_less_than_their_memory_allows() {
    let rate = |id: &str| {
        let sig = product_of_few_rows(DType::Bf16);
        sig.bytes() / part(id).unwrap().best_profile().time(&sig).0
    };
    let per_sm = rate("H20-96GB") / 78.0;
    assert!((15e9..25.4e9).contains(&per_sm), "{per_sm}");
    assert!(rate("H20-96GB") < 0.6 * rate("H200-SXM-141GB"));
}

#[test]
fn the_b300_decodes_no_slower_than_the_b200() {
    let time = |id: &str, sig: &OpSig| part(id).unwrap().best_profile().time(sig).0;
    for sig in [product_of_few_rows(DType::Bf16), product_of_few_rows(DType::F8E4m3), decode_of_48()] {
        let (b300, b200) = (time("B300-SXM", &sig), time("B200-SXM", &sig));
        assert!(b300 <= 1.02 * b200, "{sig:?}: {b300} against {b200}");
    }
}

#[test]
fn parts_without_kernel_times_reach_half_and_say_how_far_that_is_off() {
    for part in parts().iter().filter(|part| part.reached_profile().is_none()) {
        let (best, sheet) = (part.best_profile(), part.profile());
        let share = if part.kind == PartKind::Cpu { 1.0 } else { 0.5 };
        assert_eq!(best.bandwidth.0, share * sheet.bandwidth.0, "{}", part.id);
        let stated = best.provenance.evidence.iter().all(|kind| kind.error >= Some(0.4));
        assert!(stated && (best.provenance.evidence.is_empty() == (share == 1.0)), "{}", part.id);
    }
}
