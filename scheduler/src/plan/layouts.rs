//! How the devices of an instance may share a model.

use crate::cost::{DEVICES_MAX, Interconnect, ModelShape};
use mixfleet_hal::catalog::Part;
use serde::Serialize;

/// Devices of instances that are candidates in any case, in a server.
pub(super) const IN_SERVER: [u32; 4] = [1, 2, 4, 8];
/// Devices of instances over several servers, which are candidates where one is too small or too slow.
pub(super) const OVER_SERVERS: [u32; 2] = [16, 32];

/// How the devices of an instance share a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct InstanceLayout {
    /// All devices.
    pub devices: u32,
    /// Stages of layers that they form; 1 where each device has its share of every layer.
    pub stages: u32,
    /// Whether the devices of a stage have whole experts and sequences, instead of shares of all of them.
    pub expert_parallel: bool,
}

impl InstanceLayout {
    /// Devices each of which has its share of every layer (tensor parallelism).
    pub const fn of(devices: u32) -> Self {
        InstanceLayout { devices, stages: 1, expert_parallel: false }
    }

    /// Devices of a stage.
    pub const fn per_stage(self) -> u32 {
        self.devices / self.stages
    }

    /// One stage of it.
    pub(super) const fn stage(self) -> Self {
        InstanceLayout { devices: self.per_stage(), stages: 1, ..self }
    }

    /// What it is beside tensor parallelism, in words after the devices.
    pub fn words(self) -> String {
        let stages = if self.stages > 1 { format!(" in {} stages", self.stages) } else { String::new() };
        format!("{stages}{}", if self.expert_parallel { " by experts" } else { "" })
    }

    /// The layouts of so many devices of a part that are worth a try. Stages stand in for tensor parallelism
    /// where a model does not divide so, and beside it where devices have no links of their own, since sums
    /// over a host's bus take longer than stages idle, and beyond a server.
    pub(super) fn all(devices: u32, part: &Part, shape: &ModelShape) -> Vec<Self> {
        let splits = |count: &u32| *count == 1 || shape.check_split(*count).is_ok();
        let widest = IN_SERVER.into_iter().rev().filter(|count| *count <= devices).find(splits).unwrap_or(1);
        let mut widths = vec![widest];
        if devices > 1 && Interconnect::of(part, DEVICES_MAX).is_bus() {
            widths
                .extend([2, 1].into_iter().filter(|width| *width < widest && devices / width <= DEVICES_MAX));
        }
        let in_stages =
            |width: u32| InstanceLayout { stages: devices / width, ..InstanceLayout::of(devices) };
        let mut all: Vec<Self> = widths.into_iter().map(in_stages).collect();
        let width = devices.min(DEVICES_MAX);
        if width > 1 && shape.with_whole_experts(width).is_some_and(|shape| shape.check_split(width).is_ok())
        {
            all.push(InstanceLayout { expert_parallel: true, ..in_stages(width) });
        }
        all.retain(|layout| layout.stages <= shape.layers());
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::find;
    use mixfleet_hal::DType;
    use mixfleet_hal::catalog::part;

    fn of(id: &str, model: &str, devices: u32) -> Vec<(u32, u32, bool)> {
        let shape = find(model).unwrap().shape(DType::Bf16);
        let all = InstanceLayout::all(devices, part(id).unwrap(), &shape);
        assert!(all.iter().all(|layout| layout.devices == devices));
        all.into_iter().map(|layout| (layout.per_stage(), layout.stages, layout.expert_parallel)).collect()
    }

    #[test]
    fn stages_stand_in_for_slow_links_and_beyond_a_server_and_experts_beside_their_slices() {
        assert_eq!(of("H100-SXM-80GB", "llama-3.1-8b", 1), [(1, 1, false)]);
        assert_eq!(of("H100-SXM-80GB", "llama-3.1-70b", 8), [(8, 1, false)]);
        assert_eq!(of("H100-SXM-80GB", "llama-3.1-70b", 32), [(8, 4, false)]);
        assert_eq!(of("L40S", "llama-3.1-70b", 2), [(2, 1, false), (1, 2, false)]);
        assert_eq!(of("L40S", "llama-3.1-70b", 8), [(8, 1, false), (2, 4, false), (1, 8, false)]);
        assert_eq!(of("L40S", "llama-3.1-70b", 16), [(8, 2, false), (2, 8, false)]);
        assert_eq!(of("H100-SXM-80GB", "deepseek-v3", 8), [(8, 1, false), (8, 1, true)]);
        assert_eq!(of("H100-SXM-80GB", "deepseek-v3", 16), [(8, 2, false), (8, 2, true)]);
        // 28 query heads over 4 KV heads divide over four devices
        assert_eq!(of("H100-SXM-80GB", "qwen2.5-7b", 8), [(4, 2, false)]);
    }
}
