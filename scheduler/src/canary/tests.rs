//! Clean pairs raise no alarm, faults do, and no sequence of events lets an unproven pair share requests.

use super::*;
use mixfleet_hal::random::Stream;
use proptest::prelude::*;

const PAIR: CanaryPair = CanaryPair { from: InstanceId(0), to: InstanceId(1) };
const FORM: &str = "0.32.0 16 auto";

/// How far answers are apart where nothing is corrupted: log-normal around a median that differs by prompt,
/// with a rare large one (a token that another expert takes).
#[derive(Clone, Copy, Debug)]
struct DriftWorld {
    median: f64,
    spread: f64,
    by_prompt: f64,
    outliers: f64,
}

const WORLDS: [DriftWorld; 5] = [
    DriftWorld { median: 2e-5, spread: 0.7, by_prompt: 0.5, outliers: 0.0 },
    DriftWorld { median: 0.02, spread: 0.6, by_prompt: 0.4, outliers: 0.0 },
    DriftWorld { median: 0.02, spread: 1.0, by_prompt: 0.7, outliers: 0.002 },
    DriftWorld { median: 0.1, spread: 0.5, by_prompt: 0.5, outliers: 0.002 },
    DriftWorld { median: 0.25, spread: 0.4, by_prompt: 0.3, outliers: 0.0 },
];

impl DriftWorld {
    fn clean(self, source: &mut Stream) -> CanaryFinding {
        let prompt = self.median * (self.by_prompt * source.next_normal()).exp();
        let mut one = || {
            if source.next_unit() < self.outliers {
                return 0.2 + 0.8 * source.next_unit();
            }
            prompt * (self.spread * source.next_normal()).exp()
        };
        let divided = one();
        CanaryFinding { divided, control: Some(one()) }
    }

    /// A corrupted one: some nats, log-normal around this median.
    fn corrupt(self, source: &mut Stream, nats: f64) -> CanaryFinding {
        let divided = nats * (0.5 * source.next_normal()).exp();
        CanaryFinding { divided, ..self.clean(source) }
    }
}

fn watch() -> CanaryWatch {
    CanaryWatch::new(CanaryConfig::default())
}

/// One canary, at any share.
fn canary(watch: &mut CanaryWatch, now: f64, finding: Option<CanaryFinding>) -> Option<CanaryChange> {
    let plan = watch.begin(Seconds(now), PAIR, FORM, 0.0).expect("it is due");
    let finding = finding.map(|finding| match plan.control {
        true => finding,
        false => CanaryFinding { control: None, ..finding },
    });
    watch.end(Seconds(now), &plan, finding)
}

/// A watch whose pair is proven, and the number of canaries that took.
fn proven(world: DriftWorld, source: &mut Stream) -> (CanaryWatch, u32) {
    let mut watch = watch();
    for count in 1..200 {
        if canary(&mut watch, 0.0, Some(world.clean(source))) == Some(CanaryChange::Proven) {
            return (watch, count);
        }
    }
    panic!("a clean pair is not proven: {:?}", watch.view(PAIR, FORM))
}

#[test]
fn ten_thousand_clean_canaries_raise_no_alarm() {
    for world in WORLDS {
        for seed in 0..5 {
            let mut source = Stream::new(seed);
            let (mut watch, took) = proven(world, &mut source);
            assert!(took <= 100, "{world:?} {seed}: proven after {took}");
            let mut suspected = 0;
            for number in 0..10_000 {
                match canary(&mut watch, 0.0, Some(world.clean(&mut source))) {
                    None | Some(CanaryChange::Proven) => {}
                    Some(CanaryChange::Suspected) => suspected += 1,
                    Some(alarm) => panic!("{world:?} {seed}: {alarm:?} after {number}"),
                }
            }
            assert!(suspected <= 10, "{world:?} {seed}: suspected {suspected} times");
        }
    }
}

#[test]
fn damage_is_found_within_100_canaries_of_a_new_and_a_proven_pair() {
    for (at, world) in WORLDS.into_iter().enumerate() {
        // faults that damage every transfer, and faults that damage one in three
        for (share, nats) in [(1.0, 3.0), (0.35, 6.0)] {
            for seed in 0..20 {
                let mut source = Stream::new(100 * seed + at as u64);
                for is_new in [true, false] {
                    let mut watch = if is_new { watch() } else { proven(world, &mut source).0 };
                    let found = (1..=100).find(|_| {
                        let finding = match source.next_unit() < share {
                            true => world.corrupt(&mut source, nats),
                            false => world.clean(&mut source),
                        };
                        matches!(canary(&mut watch, 0.0, Some(finding)), Some(CanaryChange::Corrupt(_)))
                    });
                    assert!(found.is_some(), "{world:?} {share} {seed} new: {is_new}");
                }
            }
        }
    }
}

#[test]
fn one_canary_alone_raises_no_alarm_but_stops_sharing() {
    let mut source = Stream::new(1);
    for world in WORLDS {
        let (mut watch, _) = proven(world, &mut source);
        let worst = CanaryFinding { divided: f64::NAN, control: None };
        let first = canary(&mut watch, 0.0, Some(worst));
        assert!(!matches!(first, Some(CanaryChange::Corrupt(_))), "{world:?}");
        if world.median < 0.01 {
            assert_eq!(first, Some(CanaryChange::Suspected));
            assert!(watch.phase(PAIR, FORM).barred().is_some());
        }
    }
}

#[test]
fn engines_that_differ_alone_are_told_from_corruption() {
    let mut source = Stream::new(2);
    let mut watch = watch();
    let far = |source: &mut Stream| 2.0 * (0.3 * source.next_normal()).exp();
    let change = (0..100).find_map(|_| {
        let (divided, control) = (0.01, Some(far(&mut source)));
        canary(&mut watch, 0.0, Some(CanaryFinding { divided, control }))
    });
    assert_eq!(change, Some(CanaryChange::Disagree(Seconds(60.0))));
}

#[test]
fn pauses_double_and_a_pair_that_is_mended_is_proven_again() {
    let mut source = Stream::new(3);
    let world = WORLDS[1];
    let mut watch = watch();
    let (mut now, mut pauses) = (0.0, Vec::new());
    while pauses.len() < 8 {
        if let Some(CanaryChange::Corrupt(pause)) =
            canary(&mut watch, now, Some(world.corrupt(&mut source, 4.0)))
        {
            assert_eq!(watch.begin(Seconds(now + pause.0 - 0.1), PAIR, FORM, 0.0), None, "it rests");
            pauses.push(pause.0);
            now += pause.0;
        }
    }
    assert_eq!(pauses, [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0]);
    let changes: Vec<CanaryChange> =
        (0..100).filter_map(|_| canary(&mut watch, now, Some(world.clean(&mut source)))).collect();
    assert_eq!(changes, [CanaryChange::Proven]);
}

#[test]
fn kv_of_another_form_is_not_proven_and_a_restart_has_more_canaries() {
    let mut source = Stream::new(4);
    let (mut watch, _) = proven(WORLDS[1], &mut source);
    assert_eq!(watch.phase(PAIR, "fp8"), CanaryPhase::Unproven);
    let (other, early) = (CanaryPair { from: PAIR.to, to: PAIR.from }, 0.05);
    assert_eq!(watch.phase(other, FORM), CanaryPhase::Unproven, "the other way is another pair");
    for _ in 0..CanaryConfig::default().early {
        canary(&mut watch, 0.0, Some(WORLDS[1].clean(&mut source)));
    }
    assert_eq!(watch.begin(Seconds(0.0), PAIR, FORM, early), None);
    watch.restarted(PAIR.to);
    let plan = watch.begin(Seconds(0.0), PAIR, FORM, early).expect("more after a restart");
    // the form changes while a canary is in flight: what it finds is of the old one
    assert_eq!(watch.begin(Seconds(0.0), PAIR, "fp8", 0.0), None, "a pair has one canary at a time");
    let far = CanaryFinding { divided: 9.0, control: Some(0.01) };
    assert_eq!(watch.end(Seconds(0.0), &plan, Some(far)), None);
    assert_eq!(watch.view(PAIR, "fp8").map(|view| view.compared), Some(0));
}

/// Anything that can happen.
#[derive(Clone, Debug)]
enum Happens {
    Begin { pair: u32, form: bool, roll: f64 },
    End { at: usize, nats: Option<f64>, control: Option<f64> },
    Restart(u32),
    Wait(f64),
}

fn happens() -> impl Strategy<Value = Happens> {
    prop_oneof![
        6 => (0..3_u32, prop::bool::weighted(0.97), 0.0..1.0)
            .prop_map(|drawn| Happens::Begin { pair: drawn.0, form: drawn.1, roll: drawn.2 * drawn.2 }),
        6 => (0..4_usize, prop::option::weighted(0.9, -6.0..3.4), prop::option::of(-8.0..-1.0)).prop_map(
            |drawn| Happens::End { at: drawn.0, nats: drawn.1.map(f64::exp), control: drawn.2.map(f64::exp) }
        ),
        1 => (0..4_u32).prop_map(Happens::Restart),
        1 => (0.0..100.0).prop_map(Happens::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn only_proven_pairs_share_whatever_happens(events in prop::collection::vec(happens(), 1..600)) {
        let config = CanaryConfig { proven_after: 5, early: 4, ..CanaryConfig::default() };
        let mut watch = CanaryWatch::new(config.clone());
        let mut open: Vec<CanaryPlan> = Vec::new();
        // agreeing canaries of each pair since it was last new or failed
        let mut compared = BTreeMap::<(CanaryPair, bool), u32>::new();
        let mut now = 0.0;
        let pair_of = |pair: u32| CanaryPair { from: InstanceId(pair), to: InstanceId(pair + 1) };
        let form_of = |form: bool| if form { FORM } else { "fp8" };
        for event in events {
            match event {
                Happens::Begin { pair, form, roll } => {
                    let pair = pair_of(pair);
                    if watch.view(pair, form_of(form)).is_none() {
                        compared.remove(&(pair, true));
                        compared.remove(&(pair, false));
                    }
                    let before = watch.phase(pair, form_of(form));
                    if let Some(plan) = watch.begin(Seconds(now), pair, form_of(form), roll) {
                        if let CanaryPhase::Quarantined { until } = before {
                            prop_assert!(until.0 <= now, "the pair is suspended until then");
                            compared.insert((pair, form), 0);
                        }
                        prop_assert!(plan.control || before == CanaryPhase::Proven);
                        open.push(plan);
                    }
                }
                Happens::End { at, nats, control } if !open.is_empty() => {
                    let plan = open.swap_remove(at % open.len());
                    let finding = nats.map(|divided| CanaryFinding { divided, control });
                    let change = watch.end(Seconds(now), &plan, finding);
                    let form = watch.view(plan.pair, FORM).is_some();
                    if finding.is_some() {
                        *compared.entry((plan.pair, form)).or_default() += 1;
                    }
                    if change == Some(CanaryChange::Proven) {
                        let count = compared.get(&(plan.pair, form)).copied().unwrap_or(0);
                        prop_assert!(count >= config.proven_after, "proven after {count}");
                    }
                    if let Some(CanaryChange::Corrupt(pause) | CanaryChange::Disagree(pause)) = change {
                        prop_assert!(pause.0 >= config.pause_first.0 && pause.0 <= config.pause_max.0);
                        prop_assert!(watch.phase(plan.pair, form_of(form)).barred().is_some());
                        compared.insert((plan.pair, form), 0);
                    }
                }
                Happens::End { .. } => {}
                Happens::Restart(instance) => watch.restarted(InstanceId(instance)),
                Happens::Wait(time) => now += time,
            }
            prop_assert!(open.len() <= config.at_once as usize);
            for pair in (0..3).map(pair_of) {
                for form in [true, false] {
                    let phase = watch.phase(pair, form_of(form));
                    let count = compared.get(&(pair, form)).copied().unwrap_or(0);
                    prop_assert!(phase != CanaryPhase::Proven || count >= config.proven_after);
                    let evidence = watch.view(pair, form_of(form)).map_or(0.0, |view| view.evidence);
                    prop_assert!(evidence >= 0.0 && evidence.is_finite());
                    let has_suspicion = phase == CanaryPhase::Suspect;
                    prop_assert!(!has_suspicion || evidence > 0.0);
                }
            }
        }
    }
}
