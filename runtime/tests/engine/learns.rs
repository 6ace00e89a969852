//! The engine on devices that are slower than their cost models: step times are measured, and predictions
//! follow.

use super::parts;
use crate::fleet::Log;
use mixfleet_hal::DType;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds};
use mixfleet_runtime::api::Placements;
use mixfleet_runtime::engine::{EngineConfig, EngineParts, HandOffLimits, Identity};
use mixfleet_runtime::env::{Env, SeededEnv, SharedEnv};
use mixfleet_runtime::events::EventLog;
use mixfleet_runtime::metrics::Metrics;
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_runtime::request::EngineHandle;
use mixfleet_scheduler::fleet::Role;
use std::sync::Arc;
use std::time::Duration;

fn profile(speed: f64) -> DeviceProfile {
    let rates = [DType::F32, DType::Bf16].map(|dtype| (dtype, FlopPerSecond(2e8 * speed)));
    let roof = DeviceProfile::roof(rates.to_vec(), BytesPerSecond(1e8 * speed), Bytes(1e9));
    let (launch, launch_per_command) = (Seconds(2e-4 / speed), Seconds(1e-6 / speed));
    DeviceProfile { launch, launch_per_command, ..roof }
}

/// Equal devices; the first is predicted to be `believed` times as fast as it is.
fn start(
    checkpoint: &Checkpoint,
    env: &SeededEnv,
    believed: f64,
    metrics: Metrics,
    log: Log,
) -> EngineHandle {
    let config = Arc::new(checkpoint.config.clone());
    let instance = |at: u32| {
        let loaded = parts::loaded(at, Role::Auto, checkpoint, env, profile(1.0));
        let cost = loaded.predicted_by(profile(if at == 0 { believed } else { 1.0 }));
        (loaded, cost)
    };
    let instances = (0..2).map(instance).collect();
    let shared: SharedEnv = Arc::new(env.clone());
    let parts = EngineParts {
        identity: Identity::new("model".into(), "tokenizer".into(), [1, 2]),
        events: Some(EventLog::start(&shared, Box::new(log)).0),
        env: shared,
        config,
        limits: EngineConfig {
            hand_off: HandOffLimits { slot_bytes: 1 << 18, slots: 64, ..HandOffLimits::default() },
            ..EngineConfig::default()
        },
        placements: Arc::new(Placements::new(1)),
        metrics,
    };
    let links = parts::links();
    parts.start(instances, links).unwrap()
}

/// Of each device the corrections of medium prompts and small steps, and the mean of measured over predicted
/// TTFT before and after correction.
type Corrected = [([f64; 2], [f64; 2]); 2];

/// Runs requests for a minute; returns the learned corrections, and the last explanation.
fn play(believed: f64) -> (Corrected, serde_json::Value) {
    let checkpoint = tiny_variants().remove(1).1.load().unwrap();
    let env = SeededEnv::with_blocking_workers(7);
    let (metrics, log) = (Metrics::new(), Log::default());
    let handle = start(&checkpoint, &env, believed, metrics.clone(), log.clone());
    let (world, vocabulary) = (env.clone(), u64::from(checkpoint.config.vocab));
    env.run(async move {
        let mut random = Stream::new(3);
        let mut ends = Vec::new();
        for at in 0..240 {
            world.sleep(Duration::from_millis(random.below(500))).await;
            let prompt = (0..20 + random.below(300)).map(|_| random.below(vocabulary) as u32).collect();
            let request = crate::fleet::request(at.to_string(), prompt, 2 + random.below(40) as u32, None);
            let updates = handle.submit(request).await.unwrap();
            ends.push(parts::end_of(&world, updates));
        }
        for end in ends {
            end.await.unwrap();
        }
    });
    let text = metrics.encode();
    let value = |name: String| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(&name));
        line.unwrap_or_else(|| panic!("{name} is not in\n{text}")).trim().parse().unwrap()
    };
    let learned = ["part0", "part1"].map(|device| {
        let corrections = [("prefill", "medium"), ("step", "small")].map(|(kind, size)| {
            let labels = format!("{{device=\"{device}\",kind=\"{kind}\",size=\"{size}\"}}");
            value(format!("mixfleet_prediction_correction_ratios{labels}"))
        });
        let ratios = ["before", "after"].map(|correction| {
            let labels = format!("{{device=\"{device}\",kind=\"ttft\",correction=\"{correction}\"}}");
            let [sum, count] =
                ["sum", "count"].map(|of| value(format!("mixfleet_prediction_error_ratios_{of}{labels}")));
            sum / count
        });
        (corrections, ratios)
    });
    let steps = log.text();
    let last = steps.lines().rfind(|step| step.contains("\"candidates\"")).expect("requests were placed");
    let step: serde_json::Value = serde_json::from_str(last).unwrap();
    (learned, step["actions"][0]["explanation"].clone())
}

#[test]
fn a_device_slower_than_believed_is_corrected_and_the_placement_says_by_how_much() {
    let (learned, explanation) = play(2.0);
    let [(slow, [before, after]), (right, _)] = learned;
    println!("{learned:?}");
    assert!(slow.iter().all(|correction| (1.7..=2.2).contains(correction)), "{learned:?}");
    assert!(before > 1.6 && (after - 1.0).abs() < 0.3, "{learned:?}");
    assert_eq!(right, [1.0; 2], "{learned:?}");
    let of_first = explanation["candidates"][0]["terms"]["corrections"]["prefill"].as_f64().unwrap();
    assert!((1.8..=2.2).contains(&of_first), "{explanation:#}");
}

#[test]
fn devices_as_quick_as_believed_are_not_corrected() {
    let (learned, _) = play(1.0);
    assert!(learned.iter().all(|(corrections, [before, after])| *corrections == [1.0; 2] && before == after));
    assert!(learned.iter().all(|(_, [_, after])| (after - 1.0).abs() < 0.2), "{learned:?}");
}
