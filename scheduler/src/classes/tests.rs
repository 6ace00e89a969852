use super::*;
use crate::models;
use mixfleet_hal::catalog::{self, Part};
use mixfleet_hal::{DType, StoredAs};
use proptest::prelude::*;

fn demand(model: &str) -> Demand {
    let model = models::find(model).unwrap();
    let stored = StoredAs::Plain(DType::Bf16);
    Demand::new(model.shape_as(stored), model.weight_bytes(stored))
}

fn part(id: &str) -> &'static Part {
    catalog::part(id).unwrap()
}

fn claimed(id: &str, price: f64) -> PricedDevice {
    PricedDevice { name: id.into(), profile: part(id).profile(), steps: None, price: Some(UsdPerHour(price)) }
}

fn reached(id: &str, price: f64) -> PricedDevice {
    let profile = part(id).reached_profile().unwrap();
    PricedDevice { name: id.into(), profile, steps: None, price: Some(UsdPerHour(price)) }
}

fn near(got: f64, wanted: f64, tolerance: f64) -> bool {
    (got / wanted - 1.0).abs() <= tolerance
}

#[test]
fn a_single_device_is_both() {
    let classified = classify(&demand("llama-3.1-8b"), &[claimed("L4", 0.44)]);
    assert_eq!(classified[0].class, Some(DeviceClass::Both));
    assert!(classified[0].standings.iter().all(|standing| standing.break_even.is_none()));
}

/// hetero-papers 4(i): against an H100 at $2.69, with the shares of bandwidth that vLLM's decode
/// attention reaches, L40S below $0.58, RTX PRO 6000 below $1.33, RTX 4090 below $0.83.
#[test]
fn published_break_even_prices_for_attention_come_out() {
    let demand = demand("llama-3.1-70b");
    // the table's own rows give $0.60 for the L40S at this batch, and its law is 5 % faster than they are
    let parts = [("L40S", 0.58, 0.10), ("RTX-PRO-6000-SE", 1.33, 0.05), ("RTX-4090", 0.83, 0.05)];
    for (id, published, tolerance) in parts {
        let classified = classify(&demand, &[reached(id, 1.0), reached("H100-SXM-80GB", 2.69)]);
        let break_even = classified[0].standing(Job::Attention).unwrap().break_even.unwrap();
        assert!(near(break_even.0, published, tolerance), "{id}: {break_even:?}");
    }
    // No measurement of the H20 is published; with the claims of both, 2.69 x 4000 / 3350.
    let classified = classify(&demand, &[claimed("H20-96GB", 0.8), claimed("H100-SXM-80GB", 2.69)]);
    let break_even = classified[0].standing(Job::Attention).unwrap().break_even.unwrap();
    assert!(near(break_even.0, 3.21, 0.01), "{break_even:?}");
}

/// "Prefill where arithmetic is cheap, decode where bandwidth is": an H20 at Step-3's price beside an
/// H100 takes decode and leaves prefill.
#[test]
fn an_h20_decodes_and_an_h100_prefills() {
    let classified =
        classify(&demand("llama-3.1-70b"), &[claimed("H100-SXM-80GB", 2.69), claimed("H20-96GB", 0.80)]);
    let classes: Vec<_> = classified.iter().map(|device| device.class.unwrap()).collect();
    assert_eq!(classes, [DeviceClass::Prefill, DeviceClass::Decode]);
    assert_eq!(classified[0].leans_to(), Some(Job::Prefill));
    assert_eq!(classified[1].leans_to(), Some(Job::Decode));
}

/// hetero-papers 4.1 has, for LLaMA-70B at 4K tokens and the same prices, prefill at 0.153 (H100), 0.257
/// (H20), 0.142 (L40S) and 0.085 (RTX 4090) $/Mtok, by shares of arithmetic of 0.80 and so on.
#[test]
fn prefill_costs_are_those_of_the_closed_form() {
    let demand = Demand { prompt_tokens: 4096, ..demand("llama-3.1-70b") };
    for (id, price, published) in
        [("H100-SXM-80GB", 2.69, 0.153), ("L40S", 0.79, 0.142), ("RTX-4090", 0.34, 0.085)]
    {
        let standing = classify(&demand, &[reached(id, price)]).remove(0).standings.remove(0);
        let usd_per_million = standing.cost.unwrap().0 * 1e6;
        assert!(near(usd_per_million, published, 0.15), "{id}: {usd_per_million}");
    }
}

#[test]
fn little_memory_means_more_devices_then_small_batches_then_none() {
    let large = demand("llama-3.1-70b");
    let decode = |id: &str| effort(&large, &part(id).profile(), Job::Decode);
    let (h200, l40s, rtx4090) =
        (decode("H200-SXM-141GB").unwrap(), decode("L40S").unwrap(), decode("RTX-4090").unwrap());
    assert_eq!((h200.devices, h200.batch), (2, 32));
    assert_eq!((l40s.devices, l40s.batch), (8, 19));
    assert_eq!((rtx4090.devices, rtx4090.batch), (8, 2));
    assert!(decode("RTX-5080").unwrap_err().contains("8 x 16 GB"));
}

#[test]
fn a_device_without_a_price_is_no_rival_and_has_no_class_but_a_break_even() {
    let unpriced = PricedDevice { price: None, ..claimed("RTX-5090", 0.0) };
    let classified = classify(&demand("llama-3.1-8b"), &[unpriced, claimed("L4", 0.44)]);
    assert_eq!((classified[0].class, classified[1].class), (None, Some(DeviceClass::Both)));
    assert!(classified[0].standings.iter().all(|standing| standing.break_even.is_some_and(|p| p.0 > 0.0)));
}

#[test]
fn a_part_without_bf16_runs_in_f16() {
    let demand = demand("llama-3.1-8b");
    let time = |id: &str| effort(&demand, &part(id).profile(), Job::Prefill).unwrap().time;
    // 2 x 7.5e9 / 125e12 is 0.12 ms; at the f32 rate it would be eight times as long.
    assert!((0.12e-3..0.14e-3).contains(&time("V100-SXM2-32GB").0), "{:?}", time("V100-SXM2-32GB"));
}

fn pool() -> impl Strategy<Value = Vec<PricedDevice>> {
    let ids = ["L4", "L40S", "RTX-4090", "H100-SXM-80GB", "H20-96GB", "MI300X", "A100-SXM-80GB"];
    proptest::sample::subsequence(ids.to_vec(), 2..=ids.len()).prop_flat_map(|ids| {
        proptest::collection::vec(0.1f64..5.0, ids.len())
            .prop_map(move |prices| ids.iter().zip(prices).map(|(id, price)| claimed(id, price)).collect())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn classes_do_not_change_when_all_prices_are_scaled(pool in pool(), factor in 0.01f64..100.0) {
        let demand = demand("llama-3.1-8b");
        let scaled: Vec<PricedDevice> = pool
            .iter()
            .map(|c| PricedDevice { price: c.price.map(|price| price * factor), ..c.clone() })
            .collect();
        for (before, after) in classify(&demand, &pool).iter().zip(classify(&demand, &scaled)) {
            prop_assert_eq!(before.class, after.class);
        }
    }

    #[test]
    fn at_the_break_even_price_costs_are_equal_and_beyond_it_the_job_is_lost(pool in pool(), pick in 0usize..7) {
        let demand = demand("llama-3.1-8b");
        let pick = pick % pool.len();
        let before = classify(&demand, &pool);
        for job in Job::ALL {
            let standing = before[pick].standing(job).unwrap();
            let break_even = standing.break_even.unwrap();
            let mut at = pool.clone();
            at[pick].price = Some(break_even);
            let after = classify(&demand, &at);
            let rival = after.iter().find(|device| Some(&device.name) == standing.rival.as_ref()).unwrap();
            let cost = |device: &Classified| device.standing(job).unwrap().cost.unwrap().0;
            prop_assert!(near(cost(&after[pick]), cost(rival), 1e-9));
            prop_assert!(after[pick].cheapest_at(job, break_even));
            prop_assert!(before[pick].cheapest_at(job, break_even * 0.999));
            prop_assert!(!before[pick].cheapest_at(job, break_even * 1.001));
        }
    }

    #[test]
    fn every_job_has_a_cheapest_device(pool in pool()) {
        let classified = classify(&demand("llama-3.1-8b"), &pool);
        for job in Job::ALL {
            let winners = classified.iter().filter(|device| device.cheapest_at(job, device.price.unwrap()));
            prop_assert!(winners.count() >= 1, "{job:?}");
        }
    }
}
