//! Instances over several devices, whose members are lost and come back one by one.

use super::hosts::Host;
use super::lent::{LentMember, MemberLoss};
use super::partitions::worker_host;
use super::processes::NewInstance;
use super::{Kind, World};
use mixfleet_hal::{DType, Device};
use mixfleet_runtime::engine::{InstanceLimits, InstanceSpec, Loaded, MemberSpec};
use mixfleet_runtime::env::Env;
use mixfleet_runtime::model::ModelConfig;
use mixfleet_scheduler::cost::{AttnSplit, Coefficients, DecodeCoefficients, Partition, PrefillCoefficients};
use mixfleet_scheduler::fleet::Role;
use std::sync::Arc;
use std::time::Duration;

/// Mean time in which a process that died is replaced, and how many of all losses are deaths, in percent.
const AWAY_S: f64 = 1.5;
const DEATHS: u64 = 60;

/// How the devices of an instance have the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupDivision {
    Tensors,
    Stages,
    /// This many attention devices for the first one.
    Attention(AttnSplit, usize),
}

impl GroupDivision {
    /// One of the existing ones, by a random number.
    fn any(random: u64) -> GroupDivision {
        let split = [AttnSplit::Head, AttnSplit::Request, AttnSplit::Range][(random / 4 % 3) as usize];
        match random % 4 {
            0 => GroupDivision::Tensors,
            1 => GroupDivision::Stages,
            one_of_two => GroupDivision::Attention(split, one_of_two as usize - 1),
        }
    }

    fn partition(self, config: &ModelConfig) -> Partition {
        let partition = match self {
            GroupDivision::Tensors => config.divided(2),
            GroupDivision::Stages => config.in_stages(&[vec![1.0], vec![1.0]]),
            GroupDivision::Attention(split, attending) => config.with_attention(attending, split),
        };
        partition.expect("the model can be divided so")
    }

    /// What an answer of such an instance counts as.
    pub(super) fn answers(self) -> &'static str {
        match self {
            GroupDivision::Tensors => "answers of tp",
            GroupDivision::Stages => "answers of pp",
            GroupDivision::Attention(AttnSplit::Head, _) => "answers of attn by head",
            GroupDivision::Attention(AttnSplit::Request, _) => "answers of attn by request",
            GroupDivision::Attention(AttnSplit::Range, _) => "answers of attn by range",
        }
    }
}

impl World {
    /// Whether the next instance of this role is a group.
    pub(super) fn makes_group(&self, role: Role) -> bool {
        let share = self.workload.groups;
        !role.keeps() && share > 0.0 && self.unit() < share
    }

    /// Counts a piece of KV that one worker sent to another, by whether they have several devices.
    pub(super) fn count_kv(&self, from: &str, to: &str) {
        let is_group = {
            let state = self.state();
            [from, to].map(|host| {
                let mut workers = state.workers.iter();
                workers.any(|(&number, w)| w.division.is_some() && worker_host(number) == host)
            })
        };
        match is_group {
            [true, true] => self.count("KV between groups", 1),
            [true, false] => self.count("KV of groups to single devices", 1),
            [false, true] => self.count("KV of single devices to groups", 1),
            [false, false] => {}
        }
    }

    /// A group, with as many KV blocks on each of its devices as the workload has for two devices.
    pub(super) fn group(
        &self,
        name: &str,
        kind: &Kind,
        host: &Host,
        (role, limits): (Role, InstanceLimits),
    ) -> NewInstance {
        let division = GroupDivision::any(self.env.random());
        let config = kind.config(&self.workload);
        let partition = division.partition(&config);
        let block_bytes = |config: &ModelConfig| {
            u64::from(limits.block_tokens.unwrap_or(1)) * config.kv_bytes_per_token(DType::F32)
        };
        let holders = u64::from(partition.page_holders());
        let blocks = limits.kv_bytes / block_bytes(&config);
        let mut members = Vec::new();
        let specs = partition.shares().iter().enumerate().map(|(at, share)| {
            let flops = self.flops();
            let inner = self.simulated(&format!("{name}.{at}"), flops, host, kind);
            let lent = LentMember::new(inner, self.clone(), at > 0);
            members.push(lent.clone());
            let device: Arc<dyn Device> = Arc::new(lent);
            let weights = kind.checkpoint.place_share(&*device, share, &mut |_, _| {}).unwrap();
            let kv_bytes = block_bytes(&config.of_member(share)) * blocks.div_ceil(holders);
            MemberSpec { device, weights, kv_bytes }
        });
        let mut specs = specs.collect::<Vec<_>>().into_iter();
        let first = specs.next().expect("a model is on some device");
        let (device, weights) = (first.device, first.weights.expect("the first device has weights"));
        let limits = InstanceLimits { kv_bytes: first.kv_bytes, ..limits };
        let spec = InstanceSpec { device, weights, role, price: None, limits };
        let loaded = Loaded::divided(&config, &partition, spec, specs.collect()).unwrap();
        let cost = loaded.predicted_by_coefficients(Coefficients {
            prefill_s: PrefillCoefficients { overhead: 1e-3, per_token: 2e-4, per_token_squared: 0.0 },
            decode_s: DecodeCoefficients { base: 1e-3, per_sequence: 2e-4, per_kv_token: 0.0 },
        });
        NewInstance { loaded, cost, struck: None, members, division: Some(division) }
    }

    /// Loses a member of some group now and then.
    pub(super) async fn lose_members(self, mean_s: f64) {
        loop {
            self.env.sleep(self.span(mean_s)).await;
            if self.over() {
                return;
            }
            let which = self.env.random() as usize;
            let how = match self.below(100) < DEATHS {
                true => MemberLoss::Death(self.span(AWAY_S)),
                false => MemberLoss::Cut,
            };
            let member = {
                let state = self.state();
                let all = || state.workers.values().flat_map(|worker| &worker.members);
                all().nth(which % all().count().max(1)).cloned()
            };
            if let Some(member) = member {
                member.lose(how);
            }
        }
    }

    /// Whether all instances serve again, once nothing breaks any more, with right answers alone.
    ///
    /// A group without requests does not know that it has lost a member, and one that is predicted to be slow
    /// gets none while others are up, so it may take some rounds.
    pub(super) async fn assert_that_all_serve_again(&self) {
        const ROUNDS: usize = 16;
        // no instance waits for longer before it tries to reach its devices
        const PAUSE: Duration = Duration::from_secs(70);
        for round in 1..=ROUNDS {
            self.env.sleep(PAUSE).await;
            let workers = self.state().workers.len();
            let errors = self.state().census.errors();
            let asked = self.send_talks(&format!("last-{round}"), workers);
            for client in asked {
                client.await.unwrap();
            }
            let (errors, up) = {
                let state = self.state();
                let up = state.routers.values().all(|r| r.metrics.instances.get() == workers as i64);
                (state.census.errors() - errors, up)
            };
            if errors == 0 && up {
                return;
            }
        }
        panic!("{:?}: not all instances serve again: {:?}", self.env, self.state().census);
    }
}
