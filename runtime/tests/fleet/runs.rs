//! Runs of a fleet with clients of some kind.

use super::{TestFleet, ask, prompt, request};
use mixfleet_hal::random::Stream;
use mixfleet_runtime::env::{Env, SeededEnv};
use std::sync::Arc;
use std::time::Duration;

impl TestFleet {
    /// Runs requests one after the other; returns the cached tokens of each.
    pub(crate) fn run_in_turn(&self, env: &SeededEnv, prompt: &[u32], salts: &[Option<&str>]) -> Vec<u32> {
        let handle = self.start(Arc::new(env.clone()));
        let (prompt, world) = (prompt.to_vec(), env.clone());
        let salts: Vec<_> = salts.iter().map(|s| s.map(str::to_string)).collect();
        env.run(async move {
            let mut cached = Vec::new();
            for salt in salts {
                cached.push(ask(&handle, "again".into(), prompt.clone(), 3, salt).await.cached_tokens);
                world.sleep(Duration::from_secs(1)).await;
            }
            cached
        })
    }

    /// Runs clients that disconnect after some tokens. Returns the blocks' usage afterwards.
    pub(crate) fn run_leavers(&self, env: &SeededEnv, seed: u64, count: u64) -> f64 {
        let (handle, metrics) = (self.start(Arc::new(env.clone())), self.metrics.clone());
        let names = self.names.lock().unwrap().clone();
        let (world, config) = (env.clone(), self.checkpoint.config.clone());
        env.run(async move {
            let mut rng = Stream::new(seed);
            let mut ends = Vec::new();
            for at in 0..count {
                let (sender, receiver) = tokio::sync::oneshot::channel::<()>();
                let handle = handle.clone();
                let prompt = prompt(1 + rng.below(40) as u32, at, &config);
                let stay = rng.below(8);
                world.spawn(Box::pin(async move {
                    let _sender = sender;
                    let request = request(format!("leaver-{at}"), prompt, 200, None);
                    let mut updates = handle.submit(request).await.unwrap();
                    for _ in 0..stay {
                        updates.recv().await;
                    }
                }));
                ends.push(receiver);
            }
            for end in ends {
                let _ = end.await;
            }
            TestFleet::settled_usage(metrics, &names, &world).await
        })
    }
}
