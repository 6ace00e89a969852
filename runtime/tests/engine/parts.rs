//! Simulated devices of a tiny model, links between them in one process, and an engine to join them.

use crate::fleet::clock::WorldClock;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{DType, Device};
use mixfleet_runtime::api::Placements;
use mixfleet_runtime::engine::{
    EngineConfig, EngineParts, Identity, InstanceLimits, InstanceSpec, Links, Loaded,
};
use mixfleet_runtime::env::{Env, SeededEnv};
use mixfleet_runtime::metrics::Metrics;
use mixfleet_runtime::model::{Checkpoint, ModelConfig};
use mixfleet_runtime::request::{GenerateRequest, Hints, Sampling, Update, UpdateReceiver};
use mixfleet_scheduler::fleet::{FleetConfig, PartyId, Role};
use mixfleet_sim::fleet_file::FleetFile;
use mixfleet_simulated::TimeOnlyDevice;
use mixfleet_wire::{HostRegion, InProcessTransport};
use std::sync::Arc;
use tokio::sync::oneshot;

/// The device `part<at>`, which takes the time that `profile` says, with the model loaded.
pub(super) fn loaded(
    at: u32,
    role: Role,
    checkpoint: &Checkpoint,
    env: &SeededEnv,
    profile: DeviceProfile,
) -> Loaded {
    let clock = Arc::new(WorldClock(env.clone()));
    let device = TimeOnlyDevice::new(&format!("part{at}"), profile, clock).unwrap();
    let device: Arc<dyn Device> = Arc::new(device);
    let weights = checkpoint.place(&*device, &mut |_, _| {}).unwrap();
    let config = Arc::new(checkpoint.config.clone());
    let limits = InstanceLimits {
        activations: DType::F32,
        kv: DType::Bf16,
        kv_bytes: 24_000 * config.kv_bytes_per_token(DType::Bf16),
        step_tokens_max: 192,
        prefill_tokens_beside_decode_max: Some(64),
        sequences_max: 32,
        block_tokens: Some(16),
    };
    Loaded::new(&config, InstanceSpec { device, weights, role, price: None, limits }).unwrap()
}

/// Links through the memory of this process.
pub(super) fn links() -> Links {
    Links {
        transports: vec![Arc::new(InProcessTransport::new())],
        make_region: Arc::new(|bytes| Ok(Arc::new(HostRegion::new(bytes as usize)?))),
    }
}

/// An engine with the objectives of a fleet file.
pub(super) fn of_file(
    file: &FleetFile,
    env: &SeededEnv,
    config: &Arc<ModelConfig>,
    fleet: FleetConfig,
) -> EngineParts {
    let fleet = FleetConfig {
        ttft_slo: Some(Seconds(file.slo.ttft_s)),
        tbt_slo: Some(Seconds(file.slo.tbt_s)),
        tbt_share: file.slo.tbt_metric.share(),
        ..fleet
    };
    EngineParts {
        identity: Identity::new("model".into(), "tokenizer".into(), [1, 2]),
        events: None,
        env: Arc::new(env.clone()),
        config: config.clone(),
        limits: EngineConfig { fleet, ..EngineConfig::default() },
        placements: Arc::new(Placements::new(1)),
        metrics: Metrics::new(),
    }
}

/// Ends with the answer, which is not read, and returns the number of reused tokens of the prompt.
pub(super) fn end_of(world: &SeededEnv, mut updates: UpdateReceiver) -> oneshot::Receiver<u32> {
    let (sender, end) = oneshot::channel();
    world.spawn(Box::pin(async move {
        let mut reused = 0;
        while let Some(update) = updates.recv().await {
            if let Update::Started { cached_tokens } = update {
                reused = cached_tokens;
            }
        }
        let _ = sender.send(reused);
    }));
    end
}

/// A request for `tokens` tokens, each the likeliest one.
pub(super) fn greedy(id: String, prompt_ids: Arc<[u32]>, tokens: u32) -> GenerateRequest {
    GenerateRequest {
        id,
        forced_ids: Arc::new([]),
        minimum: None,
        vocabulary: None,
        prompt_ids,
        max_tokens: tokens,
        eos_ids: Arc::new([]),
        sampling: Sampling { temperature: 0.0, ..Sampling::default() },
        logprobs: None,
        grammar: None,
        cache_salt: None,
        party: PartyId::NONE,
        hints: Hints::default(),
    }
}
