use super::*;
use mixfleet_scheduler::cost::CostModel;

const PREFILL: &str = "[[pool]]\nname = 'prefill'\nrole = 'prefill'\ndevice = 'H100-SXM-80GB'\n";
const DECODE: &str = "[[pool]]\nname = 'decode'\nrole = 'decode'\ndevice = 'H100-SXM-80GB'\n";

/// A fleet of a model with these pools.
fn fleet(model: &str, pools: &str) -> Result<FleetFile, FleetFileError> {
    let none = |path: &Path| Err(format!("{} is not read", path.display()));
    let text = format!("version = 1\n[model]\nname = '{model}'\n{pools}");
    FleetFile::parse(&text, Path::new(""), &none)
}

fn llama(prefill: &str, decode: &str) -> FleetFile {
    fleet("llama-3.1-8b", &format!("{PREFILL}{prefill}{DECODE}attn_pool = 'prefill'\n{decode}")).unwrap()
}

#[test]
fn what_is_lent_is_borrowed_and_costs_nothing_more() {
    let plain = fleet("llama-3.1-8b", &format!("{PREFILL}{DECODE}")).unwrap();
    let room = plain.pools[0].cache_tokens;
    for (prefill, decode, share, lenders, lent) in [
        (1, 1, "", 1, 0.5),
        (4, 2, "attn_pool_share = 0.25\n", 2, 0.25),
        (5, 2, "attn_pool_share = 0.25\n", 2, 0.25),
        (1, 2, "", 1, 2.0 / 3.0),
        (2, 6, "attn_pool_share = 0.9\n", 1, 0.9),
    ] {
        let file = llama(&format!("count = {prefill}\n"), &format!("count = {decode}\n{share}"));
        assert_eq!(file.pools[1].cache_tokens, room, "what its own devices have");
        assert_eq!(
            file.usd_per_hour().unwrap() / f64::from(prefill + decode),
            plain.pools[0].usd_per_hour.unwrap()
        );
        let pools = file.lent();
        let [left, more] = [pools[0].cache_tokens, pools[1].cache_tokens - room];
        assert!(
            (left as f64 / (room as f64 * (1.0 - lent)) - 1.0).abs() < 1e-3,
            "{prefill} for {decode}: {left}"
        );
        let (who, borrowed) = (file.lending(1).unwrap().1, more * u64::from(decode));
        assert_eq!(who.lenders, lenders);
        let all = (room - left) * u64::from(prefill.min(lenders * decode));
        assert!(borrowed <= all + u64::from(decode), "{prefill} for {decode}: {borrowed} of {all}");
        assert!(borrowed as f64 > 0.99 * all as f64, "{prefill} for {decode}: {borrowed} of {all}");
        // a batch with the lenders' share of attention equal to their share of room
        let CostModel::Spare(_) = &pools[1].cost else { panic!("{:?}", pools[1].cost_basis) };
        assert!(pools[1].cost.spare_share(64, 64 * 4096) > 0.0);
    }
    let mut alone = llama("", "");
    alone.pools[0].count = 0;
    let pools = alone.lent();
    assert_eq!(
        (pools[1].cache_tokens, pools[1].cost.spare_share(64, 64 * 4096)),
        (room, 0.0),
        "no pool lends"
    );
}

#[test]
fn more_that_attend_take_less_each_and_prompts_make_them_slower() {
    let step = |prefill: u32, more: &str| {
        let file = llama(&format!("count = {prefill}\n"), &format!("attn_pool_share = 0.5\n{more}"));
        let cost = file.lent()[1].cost.clone();
        let of = |tenants| cost.among(tenants).unwrap().decode_step_s(128, 128 * 8192).0;
        assert_eq!(of(2), cost.decode_step_s(128, 128 * 8192).0, "as if prompts were computed always");
        (of(1), of(2), cost.spare_share(128, 128 * 8192))
    };
    let (one, two) = (step(1, ""), step(2, ""));
    assert!(one.0 < one.1, "{one:?}");
    assert!(two.2 < one.2, "{two:?} {one:?}");
    let far = step(1, "attn_link = { gb_per_s = 12.5, latency_s = 1e-3 }\n");
    assert!(far.1 > one.1 + 0.01, "32 layers of 1 ms: {far:?} {one:?}");
}

#[test]
fn what_cannot_lend_is_refused_with_the_key_and_the_reason() {
    let says = |model: &str, pools: &str, words: &[&str]| {
        let error = fleet(model, pools).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };
    let decode = format!("{DECODE}attn_pool = 'prefill'\n");
    let with = |more: &str| format!("{PREFILL}{decode}{more}");
    let llama = "llama-3.1-8b";
    says(llama, &with("attn_pool_share = 1.0\n"), &["pool 'decode': attn_pool_share", "below 1"]);
    says(llama, &with("attn_link = { gb_per_s = 1.0, latency_s = -1.0 }\n"), &["attn_link"]);
    says(llama, &with("pipeline_stages = 2\n"), &["attn_pool", "pipeline_stages"]);
    says(
        llama,
        &format!("{PREFILL}{DECODE}attn_pool_share = 0.5\n"),
        &["attn_pool_share", "needs attn_pool"],
    );
    says(
        llama,
        &format!("{PREFILL}{DECODE}attn_pool = 'prefil'\n"),
        &["no pool is called 'prefil'", "prefill"],
    );
    says(llama, &format!("{PREFILL}{DECODE}attn_pool = 'decode'\n"), &["no pool of role \"prefill\""]);
    let two = format!("{PREFILL}{decode}{}", decode.replace("name = 'decode'", "name = 'more'"));
    says(llama, &two, &["attends for 'more' already"]);
    let apart = "device = 'attn:H100-SXM-80GB,L4'";
    let prefill = PREFILL.replace("device = 'H100-SXM-80GB'", apart);
    says(llama, &format!("{prefill}{decode}"), &["no pool of role \"prefill\""]);
    let decode_apart = decode.replace("device = 'H100-SXM-80GB'", apart);
    says(llama, &format!("{PREFILL}{decode_apart}"), &["attn_pool", "combined with this device"]);
    let calibrated = "calibration = { prefill_s = { overhead = 0.1, per_token = 1e-4, per_token_squared = 0.0 }, \
                      decode_s = { base = 0.01, per_sequence = 1e-4, per_kv_token = 1e-8 } }\n";
    let prefill =
        PREFILL.replace("device = 'H100-SXM-80GB'\n", &format!("cache_tokens = 100000\n{calibrated}"));
    says(llama, &format!("{prefill}{decode}"), &["attn_pool", "without a profile"]);
}
