use super::*;
use crate::catalog::{part, parts};

fn offer(device: &str, provider: &str, price: f64) -> Offer {
    Offer {
        device: device.into(),
        price: UsdPerHour(price),
        spot: false,
        provider: provider.into(),
        tier: "stated".into(),
        region: String::new(),
        source: "a test".into(),
        date: None,
    }
}

/// FLOP/s per $/h for inputs in bf16.
fn flop_per_second<P>(per: &PerDollar<P>) -> Option<f64> {
    per.flop_per_second.iter().find(|(dtype, _)| *dtype == DType::Bf16).map(|(_, rate)| *rate)
}

fn price(offers: &[Offer], selection: Selection) -> Option<f64> {
    selection.price("X", offers).map(|price| price.usd_per_hour.0)
}

#[test]
fn a_provider_counts_once_and_hyperscalers_only_where_nobody_else_does() {
    let median = Selection::default();
    let mut offers = vec![offer("X", "aws", 9.0), offer("x", "gcp", 7.0), offer("Y", "a", 0.1)];
    assert_eq!(price(&offers, median), Some(7.0));
    offers.extend([offer("X", "a", 2.0), offer("X", "a", 6.0), offer("X", "a", 6.5), offer("X", "b", 3.0)]);
    assert_eq!(price(&offers, median), Some(2.5));
    offers.push(offer("X", "c", 4.0));
    assert_eq!(price(&offers, median), Some(3.0));
    assert_eq!(price(&offers, Selection { pick: PricePick::Least, ..median }), Some(2.0));
    assert_eq!(price(&[], median), None);
}

#[test]
fn spot_offers_count_only_when_asked_for() {
    let offers = [Offer { spot: true, ..offer("X", "a", 1.0) }, offer("X", "a", 2.0)];
    assert_eq!(price(&offers, Selection::default()), Some(2.0));
    let spot = Selection { spot: true, ..Selection::default() };
    assert_eq!(price(&offers, spot), Some(1.0));
    assert_eq!(spot.price_or_reference("RTX-4090", &[]), None);
}

#[test]
fn the_basis_says_rule_count_and_dates() {
    let dated =
        |provider, price, date: &str| Offer { date: Some(date.into()), ..offer("X", provider, price) };
    let offers = [dated("a", 2.0, "2026-05-24"), dated("b", 3.0, "2026-09-25")];
    let basis = Selection::default().price("X", &offers).unwrap().basis;
    assert_eq!(basis, "median of providers, 2 offers, 2026-05-24 to 2026-09-25");
}

#[test]
fn the_users_offers_replace_all_built_in_prices() {
    let of = |offers: &[Offer]| Selection::default().price_or_reference("rtx-4090", offers).unwrap();
    assert_eq!(of(&[]).usd_per_hour, UsdPerHour(0.38));
    assert!(of(&[]).basis.contains("2026-"), "{}", of(&[]).basis);
    let stated = [offer("RTX-4090", "user", 0.5)];
    assert_eq!(of(&stated).usd_per_hour, UsdPerHour(0.5));
    assert_eq!(Selection::default().price_or_reference("L40S", &stated), None);
}

#[test]
fn every_built_in_price_belongs_to_a_part_and_has_a_date() {
    for offer in REFERENCE_OFFERS {
        assert!(part(offer.id).is_some_and(|part| part.id == offer.id), "{}", offer.id);
        assert!((0.01..100.0).contains(&offer.usd_per_hour), "{}", offer.id);
        assert_eq!(offer.date.len(), "2026-05-24".len(), "{}", offer.id);
        assert_eq!(REFERENCE_OFFERS.iter().filter(|other| other.id == offer.id).count(), 1, "{}", offer.id);
    }
}

#[test]
fn a_dollar_buys_rates_divided_by_price_and_nothing_is_sold_for_nothing() {
    let ability = Ability::claimed(part("L40S").unwrap());
    let per = ability.per_dollar(UsdPerHour(2.0)).unwrap();
    assert_eq!(flop_per_second(&per), Some(181e12));
    assert_eq!((per.bytes_per_second, per.bytes), (432e9, 24e9));
    assert_eq!(per.origin(), "datasheet");
    assert_eq!(ability.per_dollar(UsdPerHour(0.0)), None);
    assert_eq!(ability.per_dollar(UsdPerHour(f64::NAN)), None);
}

#[test]
fn a_claim_is_never_taken_for_a_measurement() {
    for part in parts() {
        assert!(Ability::measured(&part.profile()).is_err(), "{}", part.id);
        assert!(part.reached_profile().is_none_or(|profile| Ability::measured(&profile).is_err()));
    }
    let mut profile = part("L40S").unwrap().profile();
    profile.fingerprint = "an L40S in a rack".into();
    assert_eq!(Ability::measured(&profile).unwrap().bandwidth, BytesPerSecond(864e9));
}

#[test]
fn published_shares_lower_arithmetic_and_bandwidth_but_not_memory() {
    let part = part("L40S").unwrap();
    let (claimed, published) = (Ability::claimed(part), Ability::published(part).unwrap());
    assert_eq!(published.bandwidth, claimed.bandwidth * 0.74);
    assert_eq!(published.memory, claimed.memory);
    assert!(published.compute.contains(&(DType::Bf16, FlopPerSecond(362e12 * 0.64))));
    assert!(published.compute.iter().all(|(dtype, _)| *dtype != DType::F8E4m3));
}

/// Table 3 of MegaScale-Infer (arXiv 2504.02263) divides datasheets by prices relative to the L20's:
/// H20 2214 GB/s, L20 864, L40S 800, H800 650; L40S 335 TFLOP/s, H800 187.
#[test]
fn megascale_infers_ranking_comes_out() {
    let table: Vec<(&str, PerDollar<Datasheet>)> =
        [("L20", 1.00), ("L40S", 1.08), ("H20-96GB", 1.85), ("H800-SXM-80GB", 5.28)]
            .map(|(id, price)| {
                (id, Ability::claimed(part(id).unwrap()).per_dollar(UsdPerHour(price)).unwrap())
            })
            .into();
    let bandwidth = |per: &PerDollar<Datasheet>| per.bytes_per_second / 1e9;
    let arithmetic = |per: &PerDollar<Datasheet>| flop_per_second(per).unwrap() / 1e12;
    let first = |by: &dyn Fn(&PerDollar<Datasheet>) -> f64| {
        table.iter().max_by(|a, b| by(&a.1).total_cmp(&by(&b.1))).unwrap().0
    };
    assert_eq!(first(&bandwidth), "H20-96GB");
    assert_eq!(first(&|per| per.bytes), "H20-96GB");
    assert_eq!(first(&arithmetic), "L40S");
    let near = |got: f64, published: f64| (got / published - 1.0).abs() < 0.03;
    for ((id, per), published) in table.iter().zip([864.0, 800.0, 2214.0, 650.0]) {
        assert!(near(bandwidth(per), published), "{id}: {}", bandwidth(per));
    }
    assert!(near(arithmetic(&table[1].1), 335.0) && near(arithmetic(&table[3].1), 187.0));
}

/// Table 1 of Lamina (arXiv 2405.01814): H20 at $4.63 buys 2.85 times the bytes of an H100 at $11.06,
/// TPU v6e at $2.70 3.8 times the arithmetic.
#[test]
fn laminas_ratios_come_out() {
    let per = |id, price| Ability::claimed(part(id).unwrap()).per_dollar(UsdPerHour(price)).unwrap();
    let (h100, h20, tpu) = (per("H100-SXM-80GB", 11.06), per("H20-96GB", 4.63), per("TPU-v6e", 2.70));
    let bytes = h20.bytes_per_second / h100.bytes_per_second;
    let flop = flop_per_second(&tpu).unwrap() / flop_per_second(&h100).unwrap();
    assert!((bytes - 2.85).abs() < 0.03 && (flop - 3.8).abs() < 0.05, "{bytes} {flop}");
}
