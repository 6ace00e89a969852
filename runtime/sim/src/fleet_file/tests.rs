use super::*;
use mixfleet_hal::DType;
use mixfleet_hal::units::{BytesPerSecond, FlopPerSecond, Seconds};
use mixfleet_scheduler::cost::Prefill;
use proptest::prelude::*;

const EXAMPLE: &str = r#"
version = 1
[model]
name = "llama-3.1-70b"          # from the catalog; or kv_bytes_per_token, layers, ... inline
[slo]
ttft_s = 30.0
tbt_s = 0.1
tbt_metric = "longest10"        # mean of a request's longest 10 % of token gaps; or "mean", "p99"
[kv]
block_tokens = 512
[engine]                        # per instance; also settable per pool
max_batched_tokens = 8192
max_sequences = 256
[[pool]]
name = "prefill"
role = "prefill"                # prefill | decode | auto (default)
count = 8
device = "A100-SXM-80GB"        # catalog id, or profile = "file.json"
devices_per_instance = 8
usd_per_hour = 14.0             # for the instance; default: the device's offer times devices
cache_tokens = 3_000_000
nic_gb_per_s = 80.0             # per instance, each direction; shared by its transfers
calibration = { prefill_s = { overhead = 0.08, per_token = 1.19e-4, per_token_squared = 7.467e-10 } }
[[pool]]
name = "decode"
role = "decode"
count = 8
device = "A100-SXM-80GB"
devices_per_instance = 8
usd_per_hour = 14.0
nic_gb_per_s = 80.0
calibration = { decode_s = { base = 0.0262, per_sequence = 0.0, per_kv_token = 3.5e-8 } }
[[link]]                        # optional: between pools, beyond the NICs
from = "*"
to = "*"
latency_s = 1e-5
usd_per_gb = 0.0
"#;

fn no_profile(path: &Path) -> Result<DeviceProfile, String> {
    Err(format!("cannot read {}", path.display()))
}

fn parse(text: &str) -> Result<FleetFile, FleetFileError> {
    FleetFile::parse(text, Path::new(""), &no_profile)
}

/// Parses a fleet of one pool with these keys.
fn pool(keys: &str) -> Result<FleetFile, FleetFileError> {
    parse(&format!("version = 1\n[model]\nname = \"llama-3.1-8b\"\n[[pool]]\nname = \"a\"\n{keys}"))
}

fn message(result: Result<FleetFile, FleetFileError>) -> String {
    result.unwrap_err().to_string()
}

/// Checks that the error message contains each of these words.
fn says(result: Result<FleetFile, FleetFileError>, words: &[&str]) {
    let message = message(result);
    assert!(words.iter().all(|word| message.contains(word)), "{words:?} not all in: {message}");
}

#[test]
fn an_engine_sets_the_limits_and_the_times_of_its_pools() {
    let fleet = |engine: &str, pool: &str| {
        let model = "version = 1\n[model]\nname = 'llama-3.1-70b'\ndtype = 'f8e4m3'\n";
        let pool =
            format!("[[pool]]\nname = 'x'\ndevice = 'H200-SXM-141GB'\ndevices_per_instance = 2\n{pool}");
        parse(&format!("{model}{engine}\n{pool}")).map(|fleet| fleet.pools[0].clone())
    };
    let (ours, vllm) = (fleet("", "").unwrap(), fleet("[engine]\nname = 'VLLM'", "").unwrap());
    assert_eq!((vllm.engine.max_batched_tokens, vllm.engine.max_sequences), (8192, 1024));
    assert_eq!(vllm.engine.max_prefill_tokens_beside_decode, Some(8192));
    assert_eq!(ours.engine.max_prefill_tokens_beside_decode, None);
    assert!(vllm.cost_basis.ends_with("; engine vllm"), "{}", vllm.cost_basis);
    let step = |pool: &InstancePool| pool.cost.decode_step_s(4, 4 * 1500);
    // It launches whole steps, while ours launches every operation.
    assert!(step(&vllm) < step(&ours), "{:?} {:?}", step(&vllm), step(&ours));
    // A published run: 4 clients, prompts and answers of 820 to 1024 tokens, 13.9 ms between tokens.
    assert!((step(&vllm).0 / 13.9e-3 - 1.0).abs() < 0.1, "{:?}", step(&vllm));
    let other = fleet("[engine]\nname = 'vllm'", "engine = 'trtllm'\nmax_sequences = 7\n").unwrap();
    assert!(other.cost_basis.ends_with("; engine tensorrt-llm") && other.engine.max_sequences == 7);
    let error = |engine, pool| fleet(engine, pool).unwrap_err().to_string();
    assert!(
        error("[engine]\nname = 'ollama'", "").contains("[engine] name: is 'ollama'; known are mixfleet")
    );
    assert!(error("", "engine = 'x'\n").contains("pool 'x': engine: is 'x'"));
}

#[test]
fn a_pool_may_say_how_its_devices_are_linked() {
    let step = |keys: &str| {
        let pool = format!("device = 'RTX-4090'\ndevices_per_instance = 2\n{keys}");
        self::pool(&pool).map(|fleet| fleet.pools[0].cost.step_s(&[], 64, 64_000).0)
    };
    let [host, same, peer, slow, late] = [
        "",
        "interconnect = 'PCIe4-host'\n",
        "interconnect = 'pcie4-p2p'\n",
        "interconnect = { gb_per_s = 1.0 }\n",
        "interconnect = { gb_per_s = 1.0, latency_s = 1e-3 }\n",
    ]
    .map(|keys| step(keys).unwrap());
    assert_eq!(host, same);
    assert!(peer < host && host < slow, "{peer} {host} {slow}");
    // 32 layers with two all-reduces each.
    assert!((late - slow - 64e-3).abs() < 1e-6, "{late} {slow}");
    says(self::pool("device = 'L4'\ninterconnect = 'usb'\n"), &["interconnect: is 'usb'", "nvlink4"]);
    says(self::pool("device = 'L4'\ninterconnect = { gb_per_s = 0.0 }\n"), &["gb_per_s"]);
    says(self::pool("device = 'L4'\ninterconnect = 7\n"), &["expected a name"]);
}

#[test]
fn the_example_works_as_it_stands() {
    let fleet = parse(EXAMPLE).unwrap();
    assert_eq!(fleet.model.name, "llama-3.1-70b");
    assert_eq!((fleet.model.layers, fleet.model.kv_bytes_per_token), (80, 327_680.0));
    assert_eq!(fleet.slo, Slo { ttft_s: 30.0, tbt_s: 0.1, tbt_metric: TbtMetric::Longest10 });
    assert_eq!(fleet.kv, Kv { block_tokens: 512, policy: CachePolicy::Lru, replicate_gb_per_s: None });
    assert_eq!(fleet.usd_per_hour(), Some(224.0));
    let [prefill, decode] = &fleet.pools[..] else { panic!("two pools") };
    assert_eq!((prefill.role, prefill.count, prefill.cache_tokens), (Role::Prefill, 8, 3_000_000));
    assert_eq!(
        prefill.engine,
        Engine { max_batched_tokens: 8192, max_prefill_tokens_beside_decode: None, max_sequences: 256 }
    );
    // The published fit and 80 ms.
    assert!((prefill.cost.prefill_s(0, 8000).0 - 1.080).abs() < 1e-3);
    assert!((decode.cost.decode_step_s(4, 1_000_000).0 - 0.0612).abs() < 1e-9);
    // 8 x 80 GB x 0.9 less 141 GB of weights.
    assert!((1_320_000..1_335_000).contains(&decode.cache_tokens), "{}", decode.cache_tokens);
    assert_eq!(fleet.link("prefill", "decode").unwrap().latency_s, 1e-5);
}

#[test]
fn the_missing_half_of_a_calibration_comes_from_the_device() {
    let fleet = parse(EXAMPLE).unwrap();
    let [prefill, decode] = &fleet.pools[..] else { panic!("two pools") };
    assert!(
        prefill.cost_basis.contains("decode_s fitted to kernel times published for A100-SXM-80GB"),
        "{}",
        prefill.cost_basis
    );
    let bare = parse(
        &EXAMPLE.lines().filter(|line| !line.starts_with("calibration")).collect::<Vec<_>>().join("\n"),
    );
    let device = &bare.unwrap().pools[0].cost;
    for (batch, mean) in [(1, 1000), (16, 4000), (64, 8000)] {
        let ratio = prefill.cost.decode_step_s(batch, u64::from(batch) * mean)
            / device.decode_step_s(batch, u64::from(batch) * mean);
        assert!((ratio - 1.0).abs() < 0.15, "{batch} at {mean}: {ratio}");
    }
    for tokens in [1000, 8000, 60_000] {
        let ratio = decode.cost.prefill_s(0, tokens) / device.prefill_s(0, tokens);
        assert!((ratio - 1.0).abs() < 0.15, "{tokens}: {ratio}");
    }
    let alone = "calibration = { decode_s = { base = 0.02, per_sequence = 0.0, per_kv_token = 1e-8 } }\ncache_tokens = 9999";
    says(pool(alone), &["pool 'a': calibration", "lacks prefill_s", "no device or profile"]);
}

#[test]
fn unknown_keys_are_told_with_their_place_and_the_nearest_known() {
    says(
        parse(&EXAMPLE.replace("max_sequences = 256", "max_sequence = 256")),
        &["line 13", "max_sequence", "did you mean `max_sequences`?"],
    );
    says(parse(&EXAMPLE.replace("count = 8", "cuont = 8")), &["line 17", "did you mean `count`?"]);
    says(parse(&EXAMPLE.replace("overhead", "overhed")), &["line 23", "did you mean `overhead`?"]);
    says(parse(&EXAMPLE.replace("[[link]]", "[[lnik]]")), &["did you mean `link`?"]);
    says(parse(&EXAMPLE.replace("\"longest10\"", "\"longest\"")), &["line 8", "did you mean `longest10`?"]);
    says(
        parse(&EXAMPLE.replace("role = \"prefill\"", "role = \"prefil\"")),
        &["line 16", "did you mean `prefill`?"],
    );
    // No known name is similar: the message has only the parser's list.
    let strange = message(parse(&EXAMPLE.replace("[kv]", "[kv]\nzzz = 1")));
    assert!(strange.contains("zzz") && !strange.contains("did you mean"), "{strange}");
}

#[test]
fn bad_values_are_told_with_key_value_and_what_is_allowed() {
    says(parse(&EXAMPLE.replace("version = 1", "version = 2")), &["version: is 2", "reads 1"]);
    says(
        parse(&EXAMPLE.replace("llama-3.1-70b", "llama-3.1-71b")),
        &["[model] name", "closest: llama-3.1-70b"],
    );
    says(
        parse(&EXAMPLE.replace("[kv]", "[kv]\nreplicate_gb_per_s = 0")),
        &["[kv] replicate_gb_per_s: is 0", "positive"],
    );
    says(parse(&EXAMPLE.replace("tbt_s = 0.1", "tbt_s = 0.0")), &["[slo] tbt_s: is 0", "positive"]);
    says(
        parse(&EXAMPLE.replace("block_tokens = 512", "block_tokens = 0")),
        &["[kv] block_tokens", "at least 1"],
    );
    says(
        parse(&EXAMPLE.replace("count = 8", "count = \"8\"")),
        &["line 17", "invalid type: string \"8\", expected u32"],
    );
    says(
        parse(&EXAMPLE.replace("name = \"decode\"", "name = \"prefill\"")),
        &["pool 'prefill'", "no two the same"],
    );
    says(
        parse(&EXAMPLE.replace("A100-SXM-80GB", "A100-SXM-90GB")),
        &["pool 'prefill': device", "'A100-SXM-90GB'", "A100-SXM-80GB"],
    );
    says(
        parse(&EXAMPLE.replace("base = 0.0262", "base = -1.0")),
        &["pool 'decode': calibration", "base is -1", "0 or more"],
    );
    says(
        parse(&EXAMPLE.replace("from = \"*\"", "from = \"prefil\"")),
        &["no pool is called 'prefil'", "prefill"],
    );
    says(pool("count = 1"), &["pool 'a': device", "is missing"]);
    says(pool("device = \"L4\"\nusd_per_hour = -1.0"), &["usd_per_hour: is -1"]);
    says(pool("device = \"L4\"\ndram_tokens = 5\ndram_bytes = 5e9"), &["pool 'a'", "give one of them"]);
    says(pool("device = \"L4\"\nnic_gb_per_s = 0.0"), &["nic_gb_per_s: is 0"]);
    says(pool("device = \"L4\"\ndevices_per_instance = 3"), &["devices_per_instance: 32 heads", "3 devices"]);
    says(pool("device = \"L4\"\ndevices_per_instance = 16"), &["devices_per_instance: is 16", "up to 8"]);
    says(pool("profile = \"there.json\""), &["pool 'a': profile", "there.json"]);
    says(parse("version = 1\npool = []\n[model]\nname = \"phi-4\"\n"), &["[[pool]]", "at least one"]);
    says(parse("version = "), &["line 1"]);
}

#[test]
fn a_fleet_without_prompts_or_without_answers_serves_nothing() {
    let serves = |roles: &[&str]| {
        let pool =
            |role: &&str| format!("[[pool]]\nname = \"{role}\"\nrole = \"{role}\"\ndevice = \"L40S\"\n");
        let pools: String = roles.iter().map(pool).collect();
        let fleet = parse(&format!("version = 1\n[model]\nname = \"llama-3.1-8b\"\n{pools}")).unwrap();
        fleet.check_serves().map_err(|error| error.to_string())
    };
    assert!(serves(&["decode"]).unwrap_err().contains("no pool computes prompts"));
    assert!(serves(&["prefill"]).unwrap_err().contains("no pool decodes"));
    assert!(serves(&["auto"]).is_ok() && serves(&["decode", "prefill"]).is_ok());
}

#[test]
fn a_model_that_does_not_fit_is_refused_with_the_numbers() {
    let large = |device: &str, devices: u32| {
        parse(&format!(
            "version = 1\n[model]\nname = \"llama-3.1-70b\"\n[[pool]]\nname = \"a\"\ndevice = \"{device}\"\ndevices_per_instance = {devices}"
        ))
    };
    says(large("RTX-4090", 1), &["does not fit", "1 x 24 GB x 0.9", "141.1 GB of weights of llama-3.1-70b"]);
    assert!(large("l40s", 4).is_ok());
    says(pool("device = \"L4\"\ncache_tokens = 10"), &["cache_tokens", "10 tokens", "one block of 16"]);
}

#[test]
fn a_pool_of_a_device_alone_gets_the_rest_from_the_catalog() {
    let fleet = pool("device = \"rtx-4090\"\ndram_bytes = 1.31072e9").unwrap();
    let [a] = &fleet.pools[..] else { panic!("one pool") };
    assert_eq!((a.device.as_deref(), a.role, a.count), (Some("RTX-4090"), Role::Auto, 1));
    assert_eq!(a.usd_per_hour, Some(0.38));
    assert!(a.price_basis.contains("2026-09-25"), "{}", a.price_basis);
    assert!(a.cost_basis.contains("kernel times published for RTX-4090"));
    assert_eq!((a.dram.tokens, a.ssd.tokens), (10_000, 0));
    // 24 GB x 0.9 less 16.06 GB, at 131072 bytes.
    assert!((42_000..43_000).contains(&a.cache_tokens), "{}", a.cache_tokens);
    // A step takes at least the time of reading the weights.
    let step = a.cost.decode_step_s(1, 100).0;
    assert!((0.015..0.022).contains(&step), "{step}");
    let alone = [Prefill { context: 0, tokens: 512, last: true }];
    assert!(a.cost.step_s(&alone, 8, 8000) > a.cost.step_s(&alone, 0, 0));
}

#[test]
fn a_measured_device_comes_through_the_reader() {
    let profile = |path: &Path| {
        assert_eq!(path, Path::new("fleets/own.json"));
        let compute = vec![(DType::Bf16, FlopPerSecond(1e14))];
        Ok(DeviceProfile::roof(compute, BytesPerSecond(1e12), Bytes(32e9)))
    };
    let text = "version = 1\n[model]\nname = \"qwen3-8b\"\n[[pool]]\nname = \"a\"\nprofile = \"own.json\"\n";
    let fleet = FleetFile::parse(text, Path::new("fleets"), &profile).unwrap();
    let pool = &fleet.pools[0];
    assert_eq!((pool.usd_per_hour, pool.price_basis.as_str()), (None, "no offer known"));
    assert_eq!(fleet.usd_per_hour(), None);
    assert!((pool.cost.prefill_s(0, 8192).0 / (2.0 * 7.6e9 * 8192.0 / 1e14) - 1.0).abs() < 0.25);
    let two = FleetFile::parse(&format!("{text}devices_per_instance = 2\n"), Path::new("fleets"), &profile);
    says(two, &["pool 'a': device", "how several are linked"]);
}

#[test]
fn a_model_may_stand_inline() {
    let text = |model: &str, pool: &str| {
        parse(&format!("version = 1\n[model]\n{model}\n[[pool]]\nname = \"a\"\n{pool}"))
    };
    let shape =
        "layers = 32\nhidden = 4096\nheads = 32\nkv_heads = 8\nintermediate = 14336\nvocab = 128256\n";
    let same = text(shape, "device = \"L40S\"").unwrap();
    let known = pool("device = \"L40S\"").unwrap();
    assert_eq!(same.model.kv_bytes_per_token, known.model.kv_bytes_per_token);
    assert_eq!(same.pools[0].cache_tokens, known.pools[0].cache_tokens);
    assert_eq!(same.pools[0].cost, known.pools[0].cost);
    let half = text(&format!("{shape}kv_dtype = \"f8e4m3\""), "device = \"L40S\"").unwrap();
    // a byte for each element, and four for the scale of each head
    assert_eq!(half.model.kv_bytes_per_token * 256.0, known.model.kv_bytes_per_token * (128.0 + 4.0));

    let few = "layers = 61\nkv_bytes_per_token = 70272.0";
    let calibrated = "cache_tokens = 100000\ncalibration = { prefill_s = { overhead = 0.0, per_token = 1e-4, \
                      per_token_squared = 0.0 }, decode_s = { base = 0.02, per_sequence = 0.0, per_kv_token = 0.0 } }";
    assert_eq!(text(few, calibrated).unwrap().model.shape, None);
    says(text(few, "device = \"H200-SXM-141GB\""), &["pool 'a': calibration", "shape"]);
    says(text("layers = 61", "device = \"L40S\""), &["[model] hidden: is missing"]);
    says(
        text(&shape.replace("kv_heads = 8", "kv_heads = 5"), "device = \"L40S\""),
        &["kv_heads: is 5", "32"],
    );
    says(text(&format!("{shape}dtype = \"int3\""), "device = \"L40S\""), &["dtype", "'int3'", "mxfp4"]);
    says(text("", "device = \"L40S\""), &["[model] name: is missing"]);
}

#[test]
fn a_mixture_of_experts_is_sliced_or_its_experts_are_divided() {
    let read = |name: &str, more: &str| {
        let model = format!("name = \"{name}\"\ndtype = \"fp8\"\nkv_dtype = \"fp8\"");
        let pool = format!("device = \"H200-SXM-141GB\"\ndevices_per_instance = 8\n{more}");
        parse(&format!("version = 1\n[model]\n{model}\n[[pool]]\nname = \"a\"\n{pool}"))
    };
    let sliced = read("deepseek-v3", "").unwrap();
    let whole = read("deepseek-v3", "expert_parallel = true").unwrap();
    assert_eq!((sliced.model.layers, sliced.model.kv_bytes_per_token), (61, 35_136.0));
    // 8 x 141 GB x 0.9 less 673 GB; every device keeps all latents
    assert!((6.6e11..6.8e11).contains(&sliced.model.weights.0), "{:?}", sliced.model.weights);
    let room = 8.0 * 141e9 * 0.9 - sliced.model.weights.0;
    assert_eq!(sliced.pools[0].cache_tokens, (room / (8.0 * 35_136.0)) as u64);
    // without copies of the KV, beside seven more copies of the weights around the experts
    let tokens = whole.pools[0].cache_tokens as f64 * 35_136.0;
    assert!(tokens < room && tokens > room - 7.0 * 20e9, "{tokens} of {room}");
    assert_ne!(whole.pools[0].cost, sliced.pools[0].cost);
    says(
        read("llama-3.1-70b", "expert_parallel = true"),
        &["expert_parallel", "llama-3.1-70b has no experts"],
    );
    // everything else is divided, so that memory is as it was; a step waits for the busiest device
    let by_member = |more: &str| read("deepseek-v3", &format!("experts_by_member = true\n{more}")).unwrap();
    let (even, skewed) = (by_member(""), by_member("expert_skew = 0.5"));
    assert_eq!(even.pools[0].cache_tokens, sliced.pools[0].cache_tokens);
    // arithmetic: a member that is bound by memory reads all of its experts, at any skew
    let prompt = mixfleet_scheduler::cost::Prefill { context: 0, tokens: 8192, last: true };
    let step = |file: &FleetFile| file.pools[0].cost.step_s(&[prompt], 0, 0).0;
    assert!(step(&skewed) > step(&even), "{} {}", step(&skewed), step(&even));
    says(read("deepseek-v3", "expert_skew = 0.5"), &["expert_skew", "experts_by_member"]);
    says(read("llama-3.1-70b", "experts_by_member = true"), &["experts_by_member", "has no experts"]);
    says(read("glm-5", ""), &["[model] name", "by an index"]);
    // a sequence's states take room for each sequence that may run
    let few = read("qwen3.5-397b-a17b", "max_sequences = 1").unwrap();
    let many = read("qwen3.5-397b-a17b", "max_sequences = 256").unwrap();
    assert!(many.pools[0].cache_tokens < few.pools[0].cache_tokens);
}

#[test]
fn the_examples_of_the_guide_work() {
    let guide = include_str!("../../../../docs/reference/fleet-file.md");
    let examples: Vec<&str> =
        guide.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert!(examples.len() >= 2);
    for example in examples {
        let fleet = parse(example).unwrap_or_else(|error| panic!("{error}\n{example}"));
        assert!(fleet.usd_per_hour().is_some(), "{example}");
    }
}

#[test]
fn flexible_pools_have_a_role_and_thresholds_apart() {
    let flexible = EXAMPLE.replace("count = 8", "count = 8\nflexible = true");
    let rule = parse(&flexible).unwrap().rebalance.unwrap();
    assert_eq!(rule, Rebalance::new(vec![0, 1]));
    let rule = parse(&format!("{flexible}[rebalance]\nhold_s = 60.0\nlow = 0.5\n")).unwrap().rebalance;
    assert_eq!(rule, Some(Rebalance { hold: Seconds(60.0), low: 0.5, ..Rebalance::new(vec![0, 1]) }));
    assert_eq!(parse(EXAMPLE).unwrap().rebalance, None);
    says(parse(&format!("{EXAMPLE}[rebalance]\n")), &["[rebalance]", "flexible = true"]);
    says(
        parse(&format!("{flexible}[rebalance]\nlow = 0.9\n")),
        &["[rebalance] low: is 0.9", "less than high"],
    );
    says(parse(&format!("{flexible}[rebalance]\nhold_s = 0.0\n")), &["[rebalance] hold_s: is 0", "positive"]);
    says(pool("device = \"L4\"\nflexible = true"), &["pool 'a': flexible", "auto", "prefill or decode"]);
}

#[test]
fn stages_take_their_devices_memory_and_rent_and_share_a_prompt() {
    let of = |keys: &str| {
        pool(&format!(
            "device = \"L40S\"\nrole = \"prefill\"\nnic_gb_per_s = 25.0\nmax_batched_tokens = 512\n{keys}"
        ))
    };
    let (one, four) = (of("").unwrap(), of("pipeline_stages = 4").unwrap());
    let [one, four] = [one, four].map(|fleet| fleet.pools[0].clone());
    assert_eq!(four.usd_per_hour.unwrap(), 4.0 * one.usd_per_hour.unwrap());
    assert!(
        four.cache_tokens > 4 * one.cache_tokens && four.cost_basis.contains("4 stages in chunks of 512")
    );
    let speedup = |tokens| one.cost.prefill_s(0, tokens) / four.cost.prefill_s(0, tokens);
    assert!((3.3..4.0).contains(&speedup(60_000)), "{}", speedup(60_000));
    assert!((0.9..1.0).contains(&speedup(400)), "{}", speedup(400));

    says(of("pipeline_chunk_tokens = 512"), &["pool 'a': pipeline_chunk_tokens", "pipeline_stages"]);
    says(of("pipeline_stages = 33"), &["pool 'a': pipeline_stages: is 33", "32 layers"]);
    says(of("pipeline_stages = 0"), &["pipeline_stages: is 0"]);
    says(
        of("pipeline_stages = 2\npipeline_chunk_tokens = 9000"),
        &["is 9000", "max_batched_tokens, which is 512"],
    );
    // sequences in two groups, each in half of the layers at a time
    let whole = pool("device = \"L40S\"").unwrap().pools[0].cost.decode_step_s(8, 8000);
    let two = pool("device = \"L40S\"\npipeline_stages = 2").unwrap().pools[0].cost.clone();
    let step = two.decode_step_s(16, 16_000);
    assert!(step > whole && step.0 < whole.0 + 1e-4, "{step:?} {whole:?}");
    says(
        parse(&EXAMPLE.replace("role = \"prefill\"", "role = \"prefill\"\npipeline_stages = 2")),
        &["calibration"],
    );
}

#[test]
fn the_first_link_that_fits_counts() {
    let links = "[[link]]\nfrom = \"pre*\"\nto = \"decode\"\ngb_per_s = 3.0\n[[link]]\nlatency_s = 2.0\n";
    let fleet = parse(&EXAMPLE.replace("[[link]]", &format!("{links}[[link]]"))).unwrap();
    assert_eq!(fleet.link("prefill", "decode").unwrap().gb_per_s, Some(3.0));
    assert_eq!(fleet.link("decode", "prefill").unwrap().latency_s, 2.0);
}

/// A naive matcher that tries every length for every star.
fn naive(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern.split_first(), name.split_first()) {
        (None, rest) => rest.is_none(),
        (Some((b'*', rest)), _) => (0..=name.len()).any(|skipped| naive(rest, &name[skipped..])),
        (Some((wanted, pattern)), Some((got, name))) => wanted == got && naive(pattern, name),
        (Some(_), None) => false,
    }
}

proptest! {
    #[test]
    fn stars_fit_whatever_they_stand_for(parts in proptest::collection::vec("[a-c]{0,3}", 1..4), fill in "[a-c]{0,4}", other in "[a-c]{0,6}") {
        let (pattern, name) = (parts.join("*"), parts.join(&fill));
        prop_assert!(resolve::fits(&pattern, &name));
        prop_assert!(resolve::fits("*", &name));
        let longer = pattern.clone() + "d";
        prop_assert!(!resolve::fits(&longer, &name));
        let naive = naive(pattern.as_bytes(), other.as_bytes());
        prop_assert_eq!(resolve::fits(&pattern, &other), naive, "{} {}", pattern, other);
    }

    #[test]
    fn no_text_makes_the_parser_panic(at in 0usize..1400, text in "[ -~\n]{0,8}") {
        let mut changed = EXAMPLE.to_owned();
        let at = (0..=at.min(EXAMPLE.len())).rev().find(|&at| EXAMPLE.is_char_boundary(at)).unwrap_or(0);
        changed.insert_str(at, &text);
        if let Err(error) = parse(&changed) {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}

#[test]
fn slowdowns_and_routers_are_read_and_wrong_ones_say_why() {
    let slow = |keys: &str| parse(&format!("{EXAMPLE}[[slowdown]]\n{keys}\n"));
    let pool = parse(EXAMPLE).unwrap().pools[0].name.clone();
    let read = slow(&format!("pool = \"{pool}\"\nfrom_s = 10.0\ntimes = 2.0")).unwrap().slowdowns;
    let expected = PoolSlowdown { pool: pool.clone(), instance: None, from_s: 10.0, times: 2.0, told: false };
    assert_eq!(read, [expected]);
    says(
        slow("pool = \"absent\"\nfrom_s = 1.0\ntimes = 2.0"),
        &["[[slowdown]]", "no pool is called 'absent'"],
    );
    let wrong = |keys: &str| slow(&format!("pool = \"{pool}\"\n{keys}"));
    says(wrong("instance = 999\nfrom_s = 1.0\ntimes = 2.0"), &["instance: is 999", "counted from 0"]);
    says(wrong("from_s = -1.0\ntimes = 2.0"), &["from_s: is -1", "0 or more"]);
    says(wrong("from_s = 1.0\ntimes = 0.0"), &["times: is 0", "positive"]);
    let routers = |keys: &str| parse(&format!("{EXAMPLE}[routers]\n{keys}\n"));
    assert_eq!(parse(EXAMPLE).unwrap().routers, Routing::default());
    assert_eq!(routers("count = 4\ndelay_s = 0.01").unwrap().routers, Routing { count: 4, delay_s: 0.01 });
    says(routers("count = 0"), &["[routers] count", "at least 1"]);
    says(routers("count = 65"), &["[routers] count: is 65", "at most 64"]);
    says(routers("delay_s = -1.0"), &["[routers] delay_s: is -1", "0 or more"]);
}

#[test]
fn a_pool_of_kv_nodes_needs_memory_and_has_no_device() {
    let node = |keys: &str| parse(&format!("{EXAMPLE}[[pool]]\nname = \"memory\"\nrole = \"kv\"\n{keys}\n"));
    let file = node("dram_tokens = 64000\nusd_per_gib_hour = 0.005").unwrap();
    let pool = file.pools.last().unwrap();
    let gib = 64000.0 * file.model.kv_bytes_per_token / (1u64 << 30) as f64;
    assert_eq!((pool.cache_tokens, pool.dram.tokens), (64000, 0));
    assert!((pool.usd_per_hour.unwrap() - 0.005 * gib).abs() < 1e-9);
    says(node(""), &["pool 'memory': dram_tokens", "less than one block"]);
    says(node("dram_tokens = 1"), &["dram_tokens", "less than one block"]);
    says(node("dram_tokens = 64000\ndevice = \"L4\""), &["pool 'memory': device", "leave it out"]);
    says(node("dram_tokens = 64000\nmax_sequences = 8"), &["max_sequences", "leave it out"]);
    says(node("dram_tokens = 64000\ncount = 0"), &["count", "at least 1"]);
    says(node("dram_tokens = 64000\nnic_gb_per_s = 0.0"), &["nic_gb_per_s", "positive"]);
    says(
        node("dram_tokens = 64000\nusd_per_hour = 1.0\nusd_per_gib_hour = 0.1"),
        &["pool 'memory'", "one of them"],
    );
    let of_devices = EXAMPLE.replacen("[[pool]]", "[[pool]]\nusd_per_gib_hour = 0.1", 1);
    says(parse(&of_devices), &["usd_per_gib_hour", "role \"kv\""]);
}
