//! Markets in which instances of several layouts, and dtypes, stand beside each other.

use super::branching::Microlp;
use super::candidates::{InstanceKind, PartKernels, RequestSize, ServiceLevel};
use super::layouts::{IN_SERVER, InstanceLayout, OVER_SERVERS};
use super::load::SizeClass;
use super::market::{BUSY_MAX, FormedFleet, Market, MarketAsk};
use super::offer::OfferedPart;
use super::offered::PartOnOffer;
use super::program::Duty;
use super::shortfall::Shortfall;
use crate::models::KnownModel;
use crate::{engines, models};
use mixfleet_hal::catalog::part;
use mixfleet_hal::units::{BytesPerSecond, Seconds, UsdPerHour};
use mixfleet_hal::{DType, StoredAs, WeightFormat};

const BF16: StoredAs = StoredAs::Plain(DType::Bf16);
const FP8: StoredAs = StoredAs::Quantised(WeightFormat::Fp8);

fn class(input_tokens: u32, output_tokens: u32, rate: f64) -> SizeClass {
    let size = RequestSize { input_tokens, output_tokens, cached_share: 0.0 };
    SizeClass { size, slowest: size, rate }
}

/// One part at $2 for a model.
fn ask(model: &str, id: &str, stored: &[StoredAs], classes: &[SizeClass]) -> MarketAsk {
    MarketAsk {
        model: models::find(model).unwrap(),
        stored: stored.to_vec(),
        expert_skew: 0.0,
        engine: engines::find("vllm").unwrap(),
        parts: vec![OfferedPart::new(part(id).unwrap(), UsdPerHour(2.0))],
        classes: classes.to_vec(),
        answer_tokens_max: 0,
        level: ServiceLevel { ttft: Seconds(5.0), tbt: Seconds(0.15) },
        attain: 0.99,
        confidence: 0.5,
        nic: BytesPerSecond(12.5e9),
        links: Vec::new(),
    }
}

/// Ranked fleets, none of which costs less than the bound.
fn ranked(ask: MarketAsk) -> Vec<FormedFleet> {
    let market = Market::new(ask);
    let fleets = market.rank(&Microlp, 3);
    if let Ok(bound) = market.lower_bound(&Microlp) {
        assert!(fleets.iter().all(|fleet| bound <= fleet.usd_per_hour), "{bound:?} {fleets:?}");
    }
    fleets
}

/// The cheapest fleet of one layout for each duty, counted without the market, of layouts that are allowed.
fn of_one_layout(ask: &MarketAsk, allowed: impl Fn(InstanceLayout) -> bool) -> f64 {
    let (offer, class, stored) = (&ask.parts[0], &ask.classes[0], ask.stored[0]);
    let kernels = PartKernels::of(offer.part);
    let (shape, model) = (ask.model.shape_as(stored), (ask.model, ask.expert_skew));
    let [mut whole, mut prefill, mut decode] = [f64::INFINITY; 3];
    for devices in IN_SERVER.into_iter().chain(OVER_SERVERS) {
        let all = InstanceLayout::all(devices, offer.part, &shape, ask.engine);
        for layout in all.into_iter().filter(|of| allowed(*of)) {
            let kind = InstanceKind::of((offer.part, &kernels), layout, model, stored, ask.engine).unwrap();
            let kind = kind.in_stages(layout.stages, ask.nic);
            assert_eq!(kind.layout, layout);
            let network_s = kind.sent_bytes(class.size.input_tokens) / ask.nic.0;
            let usd = |duty: Duty, network_s: f64| {
                let carried = kind.carries(duty, &class.size, &ask.level);
                let instances = carried.map_or(f64::INFINITY, |of| of.instances.max(network_s));
                (instances * class.rate / BUSY_MAX).ceil() * f64::from(devices) * offer.usd_per_hour.0
            };
            whole = whole.min(usd(Duty::Whole, 0.0));
            prefill = prefill.min(usd(Duty::Prefill, network_s));
            decode = decode.min(usd(Duty::Decode, network_s));
        }
    }
    whole.min(prefill + decode)
}

/// Whole experts and stages each make a fleet cheaper somewhere, and the market finds it.
#[test]
fn no_fleet_of_one_layout_for_each_duty_costs_less_than_the_cheapest() {
    let plain = |layout: InstanceLayout| layout.stages == 1 && layout.is_by_columns();
    for (model, id, stored, class, gains) in [
        ("deepseek-v3", "H200-SXM-141GB", FP8, class(4000, 400, 20.0), true),
        ("llama-3.1-70b", "L40S", BF16, class(4000, 200, 10.0), true),
        ("llama-3.1-70b", "H100-SXM-80GB", BF16, class(4000, 200, 10.0), false),
    ] {
        let ask = ask(model, id, &[stored], &[class]);
        let (least, without) = (of_one_layout(&ask, |_| true), of_one_layout(&ask, plain));
        let fleets = ranked(ask);
        eprintln!("{model} on {id}: {least}, without {without}, {:?}", fleets[0]);
        assert!(fleets[0].usd_per_hour.0 <= 1.01 * least, "{least} {fleets:?}");
        assert_eq!(least < 0.95 * without, gains, "{model} on {id}: {least} {without}");
        assert_eq!(fleets[0].pools.iter().any(|pool| !plain(pool.layout)), gains, "{fleets:?}");
    }
}

/// 811 GB of weights on 16 devices of 80 GB, of which 8 hold too little.
#[test]
fn a_model_that_no_server_holds_has_a_fleet_in_stages() {
    let large = || ask("llama-3.1-405b", "H100-SXM-80GB", &[BF16], &[class(2000, 200, 2.0)]);
    let fleets = ranked(large());
    assert!(!fleets.is_empty());
    let pools = || fleets.iter().flat_map(|fleet| &fleet.pools);
    assert!(pools().all(|pool| pool.layout.stages > 1 && pool.layout.per_stage() == 8), "{fleets:?}");
    let mut server = large();
    server.parts[0].most = Some(8);
    let market = Market::new(server);
    assert!(market.rank(&Microlp, 3).is_empty());
    assert_eq!(market.shortfall(&Microlp), [Shortfall::Memory { held: 0.0 }]);
}

/// Prompts of 100,000 tokens take 8 devices more than 5 s, and 16 in two stages less.
#[test]
fn prompts_that_a_server_computes_too_late_are_computed_in_stages() {
    let class = class(110_000, 20, 0.5);
    let fleets = ranked(ask("llama-3.1-70b", "H100-SXM-80GB", &[BF16], &[class]));
    let prompts = |fleet: &FormedFleet| {
        let mut of = fleet.pools.iter().filter(|pool| pool.duty != Duty::Decode);
        of.all(|pool| pool.layout.stages > 1)
    };
    assert!(!fleets.is_empty() && fleets.iter().all(prompts), "{fleets:?}");
}

/// H100 multiplies in 8 bits, A100 does not: there 8 bits save memory, which prompts alone do not need.
#[test]
fn a_dtype_is_chosen_for_each_fleet_and_the_first_that_is_asked_for_where_none_is_cheaper() {
    // one B200 holds and serves the model in either
    for (id, rate, wins) in [("H100-SXM-80GB", 1.0, FP8), ("B200-SXM", 0.01, BF16)] {
        let classes = [class(6000, 400, 3.0 * rate), class(1000, 400, rate)];
        let of = |stored: &[StoredAs]| ask("llama-3.1-70b", id, stored, &classes);
        let fleets = ranked(of(&[BF16, FP8]));
        let alone = [BF16, FP8].map(|stored| ranked(of(&[stored]))[0].usd_per_hour.0);
        assert_eq!((fleets[0].stored, fleets[0].usd_per_hour.0), (wins, alone[0].min(alone[1])), "{alone:?}");
        let bound = |stored: &[StoredAs]| Market::new(of(stored)).lower_bound(&Microlp).unwrap();
        assert!(bound(&[BF16, FP8]) <= bound(&[BF16]) && bound(&[BF16, FP8]) <= bound(&[FP8]));
    }
}

/// One device of 96 GB holds 70B parameters in 8 bits and not in 16.
#[test]
fn a_dtype_that_fits_is_found_where_another_does_not() {
    let with = |stored: &[StoredAs]| {
        let mut ask = ask("llama-3.1-70b", "H20-96GB", stored, &[class(1000, 100, 0.5)]);
        ask.parts[0].most = Some(1);
        ranked(ask)
    };
    assert!(with(&[BF16]).is_empty());
    let fleets = with(&[BF16, FP8]);
    assert!(!fleets.is_empty() && fleets.iter().all(|fleet| fleet.stored == FP8), "{fleets:?}");
}

/// Devices that a prompt each second keeps busy.
fn busy(model: &KnownModel, stored: StoredAs, layout: InstanceLayout, skew: f32) -> f64 {
    let (part, engine) = (part("H100-SXM-80GB").unwrap(), engines::find("vllm").unwrap());
    let own = (part, &PartKernels::of(part));
    let kind = InstanceKind::of(own, layout, (model, skew), stored, engine).unwrap();
    let level = ServiceLevel { ttft: Seconds(5.0), tbt: Seconds(0.15) };
    let carried = kind.carries(Duty::Prefill, &class(4000, 1, 1.0).size, &level).unwrap();
    carried.instances * f64::from(layout.devices)
}

/// One expert on each of eight devices is the busiest of eight; columns of all are as long on each.
#[test]
fn columns_cost_less_than_few_whole_experts_and_skew_makes_these_dearer() {
    let (model, eight) = (models::find("mixtral-8x7b").unwrap(), InstanceLayout::of(8));
    let columns = [0.0, 1.0].map(|skew| busy(model, BF16, eight, skew));
    let whole = [0.0, 0.5, 1.0].map(|skew| busy(model, BF16, eight.by_member(), skew));
    eprintln!("{columns:?} {whole:?}");
    assert_eq!(columns[0], columns[1]);
    assert!(columns[0] < whole[0] && whole[0] < whole[1] && whole[1] < whole[2], "{columns:?} {whole:?}");
}

/// 128 experts of 700 columns divide over eight devices as whole ones alone.
fn narrow() -> &'static KnownModel {
    let of = *models::find("qwen3-30b-a3b").unwrap();
    let experts = of.experts.map(|experts| crate::cost::Experts { intermediate: 700, ..experts });
    Box::leak(Box::new(KnownModel { experts, ..of }))
}

#[test]
fn whole_experts_stand_beside_stages_where_their_columns_do_not_divide() {
    let words = |layout: InstanceLayout| format!("{}{}", layout.per_stage(), layout.words());
    let of = |engine: &str| -> Vec<String> {
        let (part, shape) = (part("H100-SXM-80GB").unwrap(), narrow().shape_as(BF16));
        let all = InstanceLayout::all(8, part, &shape, engines::find(engine).unwrap());
        all.into_iter().map(words).collect()
    };
    assert_eq!(of("vllm"), ["4 in 2 stages", "8 by experts", "8 as ep:"]);
    assert_eq!(of("mixfleet"), ["4 in 2 stages", "8 as ep:"]);
}

/// Whole experts as candidates raise neither the bound nor the cheapest fleet's rent, beyond the programs'
/// tolerance.
#[test]
fn no_plan_costs_more_for_having_whole_experts_to_choose_from() {
    let narrow = narrow();
    let mixtral = models::find("mixtral-8x7b").unwrap();
    for (model, id, class, skew) in [
        (narrow, "H100-SXM-80GB", class(4000, 400, 40.0), 0.0),
        (narrow, "L40S", class(1000, 200, 40.0), 0.5),
        (mixtral, "H100-SXM-80GB", class(2000, 300, 20.0), 0.5),
    ] {
        let ask = MarketAsk { model, expert_skew: skew, ..ask("qwen3-30b-a3b", id, &[BF16], &[class]) };
        let mut without = PartOnOffer::new(&ask, 0);
        without.0.retain(|kind| kind.instance.layout != kind.instance.layout.by_member());
        let (with, without) = (Market::new(ask.clone()), Market::of(ask, vec![without]));
        let bounds = [&with, &without].map(|market| market.lower_bound(&Microlp).unwrap().0);
        let rents = [&with, &without].map(|market| market.rank(&Microlp, 3)[0].usd_per_hour.0);
        eprintln!("{} on {id}: bounds {bounds:?}, rents {rents:?}", model.name);
        assert!(bounds[0] <= 1.002 * bounds[1] && rents[0] <= 1.002 * rents[1], "{bounds:?} {rents:?}");
    }
}
