use super::*;
use mixfleet_hal::catalog::part;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::cost::{AttnSplit, Prefill};

/// A fleet of one pool with these keys, for a model.
fn fleet(model: &str, keys: &str) -> Result<FleetFile, FleetFileError> {
    let none = |path: &Path| Err(format!("{} is not read", path.display()));
    let text = format!("version = 1\n[model]\nname = '{model}'\n[[pool]]\nname = 'a'\n{keys}");
    FleetFile::parse(&text, Path::new(""), &none)
}

fn pool(keys: &str) -> InstancePool {
    fleet("llama-3.1-70b", keys).unwrap().pools.remove(0)
}

const APART: &str = "device = 'attn:H100-SXM-80GB,RTX-4090'\ndevices_per_instance = 4\n";

#[test]
fn kv_is_what_the_devices_that_attend_hold_and_the_rent_that_of_all() {
    let apart = pool(&format!("{APART}attn_devices = 16"));
    let of = |id: &str| part(id).unwrap().memory_bytes().0;
    assert_eq!(apart.cache_tokens, (16.0 * of("RTX-4090") * 0.9 / 327_680.0) as u64);
    let (first, others) = (pool("device = 'H100-SXM-80GB'\ndevices_per_instance = 4"), "device = 'RTX-4090'");
    let one = fleet("llama-3.1-8b", others).unwrap().pools.remove(0);
    let rent = first.usd_per_hour.unwrap() + 16.0 * one.usd_per_hour.unwrap();
    assert!((apart.usd_per_hour.unwrap() - rent).abs() < 1e-9);
    assert_eq!(apart.price_basis, format!("{}; {}", first.price_basis, one.price_basis));
    let attention = apart.attention.as_ref().unwrap();
    assert_eq!((attention.count, attention.split), (16, AttnSplit::Request));
    assert_eq!(apart.device_words(), "attn:H100-SXM-80GB,RTX-4090");
    // by head, two devices keep each of 8 KV heads
    let by_head = pool(&format!("{APART}attn_devices = 16\nattn_split = 'head'"));
    assert_eq!(by_head.cache_tokens, apart.cache_tokens / 2);
    assert_eq!(pool(&format!("{APART}attn_devices = 8")).attention.unwrap().split, AttnSplit::Head);

    let mut repriced = fleet("llama-3.1-70b", &format!("{APART}attn_devices = 2")).unwrap();
    let price = |id: &str| {
        let usd_per_hour = mixfleet_hal::units::UsdPerHour(if id == "RTX-4090" { 0.5 } else { 2.0 });
        Some(mixfleet_hal::economics::Price { usd_per_hour, basis: id.into(), date: None })
    };
    repriced.reprice(&price).unwrap();
    assert_eq!(repriced.pools[0].usd_per_hour, Some(9.0));
}

#[test]
fn steps_wait_for_both_sides_and_the_network_and_prompts_for_the_first() {
    let alone = pool("device = 'H100-SXM-80GB'\ndevices_per_instance = 4\nmax_sequences = 256");
    let of = |more: &str| pool(&format!("{APART}attn_devices = 16\nmax_sequences = 256\n{more}")).cost;
    let near = "attn_link = { gb_per_s = 1e5, latency_s = 1e-9 }\n";
    let (one, two) = (of(&format!("attn_batches = 1\n{near}")), of(near));
    let step = |cost: &CostModel| cost.decode_step_s(128, 128 * 16_384).0;
    assert!(step(&two) < step(&one), "two batches hide a part of one side: {} {}", step(&two), step(&one));
    // 80 layers, a round trip in each
    let far = of(&format!("attn_batches = 1\n{}", near.replace("1e-9", "1e-3")));
    assert!((step(&far) - step(&one) - 0.08).abs() < 1e-6);
    // 128 rows of (2 x 64 + 2 x 8) x 128 x 2 bytes in each
    let slow = of(&format!("attn_batches = 1\n{}", near.replace("1e5", "10")));
    let bytes = 80.0 * 128.0 * 36_864.0;
    assert!(((step(&slow) - step(&one)) / (bytes * (1e-10 - 1e-14)) - 1.0).abs() < 1e-6);
    // a prompt takes what it takes on the first devices alone, but for the lists that are submitted by layer
    let part = [Prefill { context: 512, tokens: 512, last: true }];
    let lists = 80.0 * part_launch("H100-SXM-80GB").0;
    let ratio = (two.step_s(&part, 0, 0).0 - lists) / alone.cost.step_s(&part, 0, 0).0;
    assert!((ratio - 1.0).abs() < 0.01, "{ratio}");
}

fn part_launch(id: &str) -> Seconds {
    part(id).unwrap().reached_profile().unwrap().launch
}

#[test]
fn what_cannot_be_apart_is_refused_with_the_key_and_the_reason() {
    let says = |model: &str, keys: &str, words: &[&str]| {
        let error = fleet(model, keys).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };
    says("deepseek-v3", "device = 'attn:H200-SXM-141GB,H20-96GB'", &["pool 'a': device", "per byte of KV"]);
    says("qwen3-next-80b-a3b", "device = 'attn:H100-SXM-80GB,L4'", &["linear attention"]);
    says("llama-3.1-8b", "device = 'attn:H100-SXM-80GB'", &["device", "two parts"]);
    says("llama-3.1-8b", "device = 'attn:L4,L4,L4'", &["two parts", "attn_devices"]);
    says("llama-3.1-8b", "device = 'attn:L4,L5'", &["no part is called 'L5'"]);
    says("llama-3.1-8b", "device = 'L4'\nattn_devices = 2", &["attn_devices", "attn:A,B"]);
    says("llama-3.1-8b", "device = 'attn:L4,L4'\nattn_devices = 0", &["attn_devices: is 0"]);
    says("llama-3.1-8b", "device = 'attn:L4,L4'\nattn_batches = 3", &["attn_batches: is 3"]);
    says("llama-3.1-8b", "device = 'attn:L4,L4'\nattn_split = 'layer'", &["attn_split", "head"]);
    says("llama-3.1-8b", "device = 'attn:L4,L4'\npipeline_stages = 2", &["pipeline_stages", "attn:"]);
    says("llama-3.1-70b", "device = 'attn:H100-SXM-80GB,L4'", &["the model does not fit"]);
    says("llama-3.1-8b", "device = 'L4'\nrole = 'attention'", &["role", "device = \"attn:A,B\"", "decode"]);
    says("llama-3.1-8b", "device = 'L4'\nrole = 'decoder'", &["unknown variant", "`decode`"]);
}
