//! How the devices of an instance may share a model.

use crate::cost::{DEVICES_MAX, ExpertsBy, Interconnect, ModelShape};
use crate::engines::KnownEngine;
use mixfleet_hal::catalog::Part;
use serde::Serialize;

/// Devices of instances that are candidates in any case, in a server.
pub(super) const IN_SERVER: [u32; 4] = [1, 2, 4, 8];
/// Devices of instances over several servers, which are candidates where one is too small or too slow.
pub(super) const OVER_SERVERS: [u32; 2] = [16, 32];

/// What the devices of a stage divide of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum LayoutExperts {
    /// Columns of each or whole ones, and everything else as in tensor parallelism.
    Divided(ExpertsBy),
    /// Whole ones, and the sequences: each has all other weights (`expert_parallel` of a fleet file).
    WithSequences,
}

/// How the devices of an instance share a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct InstanceLayout {
    /// All devices.
    pub devices: u32,
    /// Stages of layers that they form; 1 where each device has its share of every layer.
    pub stages: u32,
    /// What the devices of a stage divide of experts, if there are some.
    pub experts: LayoutExperts,
}

impl InstanceLayout {
    /// Devices that each have a share of every layer (tensor parallelism).
    pub const fn of(devices: u32) -> Self {
        InstanceLayout { devices, stages: 1, experts: LayoutExperts::Divided(ExpertsBy::Columns) }
    }

    /// The same, whose devices divide whole experts and everything else as before.
    #[must_use]
    pub const fn by_member(self) -> Self {
        InstanceLayout { experts: LayoutExperts::Divided(ExpertsBy::Member), ..self }
    }

    /// The same, whose devices divide whole experts and sequences.
    #[must_use]
    pub const fn with_sequences(self) -> Self {
        InstanceLayout { experts: LayoutExperts::WithSequences, ..self }
    }

    /// Whether the devices of a stage have shares of all that there is, columns of every expert too.
    pub fn is_by_columns(self) -> bool {
        self.experts == LayoutExperts::Divided(ExpertsBy::Columns)
    }

    /// Devices of a stage.
    pub const fn per_stage(self) -> u32 {
        self.devices / self.stages
    }

    /// One stage of the layout.
    pub(super) const fn stage(self) -> Self {
        InstanceLayout { devices: self.per_stage(), stages: 1, ..self }
    }

    /// The layout beyond tensor parallelism, in text after the devices.
    pub fn words(self) -> String {
        let stages = if self.stages > 1 { format!(" in {} stages", self.stages) } else { String::new() };
        let experts = match self.experts {
            LayoutExperts::Divided(ExpertsBy::Columns) => "",
            LayoutExperts::Divided(ExpertsBy::Member) => " as ep:",
            LayoutExperts::WithSequences => " by experts",
        };
        format!("{stages}{experts}")
    }

    /// The layouts of this many devices of a part that `engine` runs and that are worth trying. Stages
    /// replace tensor parallelism where a model does not divide evenly. They are also tried where devices
    /// have no links of their own, since sums over a host's bus take longer than stages idle, and beyond a
    /// server.
    pub(super) fn all(devices: u32, part: &Part, shape: &ModelShape, engine: &KnownEngine) -> Vec<Self> {
        let is_bus = devices > 1 && Interconnect::of(part, DEVICES_MAX).is_bus();
        let in_stages =
            |width: u32| InstanceLayout { stages: devices / width, ..InstanceLayout::of(devices) };
        let divided = |shape: &ModelShape| {
            let splits = |count: &u32| *count == 1 || shape.check_split(*count).is_ok();
            let widest = IN_SERVER.into_iter().rev().filter(|count| *count <= devices).find(splits);
            let widest = widest.unwrap_or(1);
            let narrow = |width: &u32| is_bus && *width < widest && devices / width <= DEVICES_MAX;
            let widths = std::iter::once(widest).chain([2, 1].into_iter().filter(narrow));
            widths.map(in_stages).collect::<Vec<Self>>()
        };
        let mut all = divided(shape);
        let width = devices.min(DEVICES_MAX);
        let splits = |shape: ModelShape| shape.check_split(width).is_ok();
        if engine.divides_sequences && width > 1 && shape.with_whole_experts(width).is_some_and(splits) {
            all.push(in_stages(width).with_sequences());
        }
        // how unlike experts are does not say what divides
        if let Some(shape) = shape.with_experts_by_member(0.0) {
            let several = divided(&shape).into_iter().filter(|layout| layout.per_stage() > 1);
            all.extend(several.map(Self::by_member));
        }
        all.retain(|layout| layout.stages <= shape.layers());
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines;
    use crate::models::find;
    use mixfleet_hal::DType;
    use mixfleet_hal::catalog::part;

    fn of(id: &str, model: &str, devices: u32) -> Vec<String> {
        let shape = find(model).unwrap().shape(DType::Bf16);
        let vllm = engines::find("vllm").unwrap();
        let all = InstanceLayout::all(devices, part(id).unwrap(), &shape, vllm);
        assert!(all.iter().all(|layout| layout.devices == devices));
        all.into_iter().map(|layout| format!("{}{}", layout.per_stage(), layout.words())).collect()
    }

    #[test]
    fn a_model_without_experts_never_divides_any_and_every_mixture_that_may_does() {
        let (h100, l40s) = (part("H100-SXM-80GB").unwrap(), part("L40S").unwrap());
        for model in crate::models::models() {
            let shape = model.shape(DType::Bf16);
            for (devices, part) in [1, 2, 4, 8, 16].into_iter().flat_map(|n| [(n, h100), (n, l40s)]) {
                let [all, ours] = ["vllm", "mixfleet"]
                    .map(|engine| InstanceLayout::all(devices, part, &shape, engines::find(engine).unwrap()));
                // all but what this project's engine does not run
                let mut run = all.clone();
                run.retain(|layout| layout.experts != LayoutExperts::WithSequences);
                assert_eq!(ours, run, "{} on {devices} {}", model.name, part.id);
                let own =
                    all.iter().filter(|layout| layout.experts == InstanceLayout::of(1).by_member().experts);
                let mut shapes = own.map(|layout| (layout.per_stage(), shape.with_experts_by_member(0.0)));
                let may = shape.experts.is_some_and(|of| of.count.is_multiple_of(2)) && devices > 1;
                assert_eq!(shapes.clone().count() > 0, may, "{} on {devices} {}", model.name, part.id);
                assert!(shapes.all(|(width, of)| width > 1 && of.unwrap().check_split(width).is_ok()));
                assert!(all.iter().all(|one| all.iter().filter(|other| one == *other).count() == 1));
            }
        }
    }

    #[test]
    fn stages_stand_in_for_slow_links_and_beyond_a_server_and_experts_beside_their_slices() {
        assert_eq!(of("H100-SXM-80GB", "llama-3.1-8b", 1), ["1"]);
        assert_eq!(of("H100-SXM-80GB", "llama-3.1-70b", 8), ["8"]);
        assert_eq!(of("H100-SXM-80GB", "llama-3.1-70b", 32), ["8 in 4 stages"]);
        assert_eq!(of("L40S", "llama-3.1-70b", 2), ["2", "1 in 2 stages"]);
        assert_eq!(of("L40S", "llama-3.1-70b", 8), ["8", "2 in 4 stages", "1 in 8 stages"]);
        assert_eq!(of("L40S", "llama-3.1-70b", 16), ["8 in 2 stages", "2 in 8 stages"]);
        assert_eq!(of("H100-SXM-80GB", "deepseek-v3", 1), ["1"]);
        assert_eq!(of("H100-SXM-80GB", "deepseek-v3", 8), ["8", "8 by experts", "8 as ep:"]);
        let in_two = ["8 in 2 stages", "8 in 2 stages by experts", "8 in 2 stages as ep:"];
        assert_eq!(of("H100-SXM-80GB", "deepseek-v3", 16), in_two);
        let over_a_bus =
            ["4", "2 in 2 stages", "1 in 4 stages", "4 by experts", "4 as ep:", "2 in 2 stages as ep:"];
        assert_eq!(of("L40S", "qwen3-30b-a3b", 4), over_a_bus);
        // 28 query heads over 4 KV heads divide over four devices
        assert_eq!(of("H100-SXM-80GB", "qwen2.5-7b", 8), ["4 in 2 stages"]);
    }
}
