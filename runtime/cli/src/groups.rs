//! Simulated parts that serve as one instance: `tp:sim:A,sim:A`, `pp:(tp:sim:A,sim:A),(tp:sim:A,sim:A)`,
//! `attn:sim:A,sim:B`.
//!
//! Parts that compute nothing need no results of each other, so that one device stands for all: it has their
//! memory, and takes the time that the cost model of the group predicts.

use crate::failure::UsageError;
use crate::model::LoadedModel;
use crate::notation::{Sharing, Written, WrittenGroup};
use anyhow::{Context, Result, bail};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::catalog::{self, Part};
use mixfleet_hal::profile::Predictor;
use mixfleet_hal::units::{Bytes, BytesPerSecond, GB, Seconds};
use mixfleet_hal::{Cmd, Device};
use mixfleet_scheduler::cost::{
    AllReduce, Attending, AttnSplit, CostModel, EngineCost, ExpertsBy, LockstepCost, ModelShape, Partition,
    PipelineCost, ProfileCost,
};
use mixfleet_scheduler::sizing::{GivenSizes, MEMORY_SHARE, ridge, step_tokens};
use mixfleet_sim::fleet_file::InstancePool;
use mixfleet_simulated::{GroupTimes, RealClock, TimeOnlyDevice};
use std::sync::Arc;

/// The keyword in a selector before the factor on its clock.
const DILATION: &str = "dilation:";
/// Devices of a stage, and stages, that are tried for a model that does not fit.
const DEVICES: [u32; 4] = [1, 2, 4, 8];

/// Parts that share a model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SimGroup {
    selector: String,
    part: &'static Part,
    /// Devices of a stage, which divide its layers.
    per_stage: u32,
    stages: u32,
    /// What the devices of a stage divide of experts.
    experts: ExpertsBy,
    /// The part and the number of devices that attend for the others.
    attending: Option<(&'static Part, u32)>,
    dilation: f64,
}

/// The device of a group, the cost of its steps, and its KV memory.
pub(crate) struct OpenGroup {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) cost: CostModel,
    pub(crate) given: GivenSizes,
}

/// Equal devices: their part, devices of a stage and what they divide of experts, stages, and the clock's
/// dilation.
type Alike = (&'static Part, (u32, ExpertsBy), u32, f64);

impl SimGroup {
    /// The group of a selector; `None` if it is another one.
    ///
    /// # Errors
    /// The fault of a selector of simulated parts.
    pub(crate) fn of(selector: &str) -> Result<Option<Self>> {
        let Written::Group(group) = Written::read(selector) else { return Ok(None) };
        // a device that computes, or that faults happen to, is opened alone
        let is_time_only = |device: &str| {
            let mut words = device.split(',');
            words.next().is_some_and(|part| part.starts_with("sim:"))
                && words.all(|word| word.starts_with(DILATION))
        };
        if !group.members.iter().flat_map(Written::devices).all(is_time_only) {
            return Ok(None);
        }
        let refused = |cause: String| UsageError(format!("{selector}: {cause}"));
        let own = |(part, (per_stage, experts), stages, dilation): Alike, attending| SimGroup {
            selector: selector.to_owned(),
            part,
            per_stage,
            stages,
            experts,
            attending,
            dilation,
        };
        if group.sharing != Sharing::Apart {
            return Ok(Some(own(alike_members(&group).map_err(refused)?, None)));
        }
        let (first, others) = group.members.split_first().context("a selector names a device")?;
        let first = alike(first).map_err(refused)?;
        let others: Vec<Alike> = others.iter().map(alike).collect::<Result<_, _>>().map_err(refused)?;
        let Some(&(part, ..)) = others.first() else {
            bail!(refused("needs two devices or more, as in attn:sim:A,sim:B".into()));
        };
        if first.2 > 1 || others.iter().any(|other| (other.0.id, other.1.0 * other.2) != (part.id, 1)) {
            bail!(refused("attention devices are single devices of one part, without stages".into()));
        }
        Ok(Some(own(first, Some((part, to_u32(others.len()))))))
    }

    fn devices(&self) -> u32 {
        self.per_stage * self.stages
    }

    /// Opens the device that stands for all.
    ///
    /// # Errors
    /// Why the model cannot be divided in this way, or does not fit; then with parts that hold it.
    pub(crate) fn open(&self, model: &LoadedModel, given: GivenSizes) -> Result<OpenGroup> {
        let refused = |cause: String| UsageError(format!("{}: {cause}", self.selector));
        let config = &model.checkpoint.config;
        let shape = config.cost_shape(model.activations, model.kv, 16);
        let shape = match self.experts {
            ExpertsBy::Columns => shape,
            ExpertsBy::Member => {
                let none = || refused("the model has no experts, which devices would divide".into());
                shape.with_experts_by_member(0.0).ok_or_else(none)?
            }
        };
        let chunk_tokens =
            given.step_tokens_max.unwrap_or_else(|| step_tokens(&shape, ridge(self.part, shape.weight)));
        let weights = shape.weight_bytes(config.tied_embeddings);
        if self.part.memory_bytes() * f64::from(self.devices()) * MEMORY_SHARE < weights {
            bail!(refused(does_not_fit(self.part, self.devices(), &shape, weights)));
        }
        let cost = self.cost(&shape, chunk_tokens).map_err(refused)?.compiled();
        let (room, copies) = match self.attending {
            None => {
                let all = self.part.memory_bytes() * f64::from(self.devices()) * MEMORY_SHARE;
                (all.0 - weights.0, shape.kv_copies(self.per_stage))
            }
            Some((part, count)) => {
                let partition = Partition::attention(&shape, count, AttnSplit::even(&shape, count));
                let copies = partition.map_err(refused)?.kv_copies(&shape);
                (part.memory_bytes().0 * f64::from(count) * MEMORY_SHARE, copies)
            }
        };
        let sequences = given.sequences_max.unwrap_or(64);
        let activations = shape.activation_bytes(chunk_tokens.max(sequences), sequences) as f64;
        // four contexts to a sequence find a use
        let most =
            4.0 * f64::from(sequences) * f64::from(config.context_max) * shape.kv_bytes_per_token() as f64;
        let kv = given.kv.unwrap_or(Bytes((room / copies).min(most)));
        let memory = weights + kv + Bytes(2.0 * activations) + Bytes(GB);
        let profile = self.part.best_profile();
        let profile = mixfleet_hal::profile::DeviceProfile { memory, ..profile };
        let times = Arc::new(GroupSteps { cost: cost.clone(), layers: config.layers, vocab: config.vocab });
        let clock = Arc::new(RealClock::new(self.dilation)?);
        let device = Arc::new(TimeOnlyDevice::of_group(&self.selector, profile, clock, times)?);
        let given =
            GivenSizes { kv: Some(kv), step_tokens_max: Some(chunk_tokens), sequences_max: Some(sequences) };
        tracing::info!(
            device = %self.selector,
            kv_gb = (kv.0 / GB * 10.0).round() / 10.0,
            decode_step_s = cost.decode_step_s(1, 1024).0,
            "simulated parts as one instance"
        );
        Ok(OpenGroup { device, cost, given })
    }

    fn cost(&self, shape: &ModelShape, chunk_tokens: u32) -> Result<CostModel, String> {
        shape.check_split(self.per_stage)?;
        if self.stages > shape.layers() {
            return Err(format!("{} stages are more than {} layers", self.stages, shape.layers()));
        }
        let all_reduce = match self.per_stage {
            1 => None,
            several => Some(
                AllReduce::of(self.part, several)
                    .ok_or_else(|| format!("what {several} devices need to exchange is unknown"))?,
            ),
        };
        let (profile, engine) = (self.part.best_profile(), EngineCost::OURS);
        let first = ProfileCost { profile, shape: shape.clone(), chunk_tokens, all_reduce, engine };
        let network = BytesPerSecond(InstancePool::NIC_GB_PER_S * GB);
        if let Some((part, count)) = self.attending {
            let partition = Partition::attention(shape, count, AttnSplit::even(shape, count))?;
            let (by, how) = (Arc::new(Predictor::new(&first.profile)), Attending::STAGGERED);
            let products = LockstepCost::products(&first, &by, how);
            let attends = Arc::new(Predictor::new(&part.best_profile()));
            let others = vec![attends; count as usize];
            let link = LockstepCost::network(network);
            let cost = LockstepCost::new(&partition, (&first, products), &others, link, how)?;
            return Ok(CostModel::Lockstep(Arc::new(cost)));
        }
        let whole = CostModel::Profile(Box::new(first));
        if self.stages == 1 {
            return Ok(whole);
        }
        let chunk = PipelineCost::CHUNK_TOKENS.min(chunk_tokens);
        Ok(CostModel::Pipeline(Arc::new(PipelineCost::of(whole, self.stages, chunk, (shape, network)))))
    }
}

/// Equal devices that share layers: a part, `tp:` of several, or `pp:` of equal ones of these.
fn alike(written: &Written) -> Result<Alike, String> {
    let text = match written {
        Written::Group(group) => return alike_members(group),
        Written::Device(text) => text,
    };
    let list = text.strip_prefix("sim:").ok_or_else(|| format!("'{text}' is no device"))?;
    let mut words = list.split(',');
    let name = words.next().unwrap_or_default();
    let name = name.rsplit_once('#').map_or(name, |(name, _)| name);
    let dilation = match words.next().and_then(|word| word.strip_prefix(DILATION)) {
        Some(factor) => factor.parse().map_err(|_| format!("'{text}' has no number after {DILATION}"))?,
        None => 1.0,
    };
    let part = catalog::named(name)?;
    Ok((part, (1, ExpertsBy::Columns), 1, dilation))
}

fn alike_members(group: &WrittenGroup) -> Result<Alike, String> {
    let text = &group.text;
    let all: Vec<Alike> = group.members.iter().map(alike).collect::<Result<_, _>>()?;
    let one = all[0];
    let count = to_u32(all.len());
    if count < 2 || all.iter().any(|other| (other.0.id, other.1, other.2) != (one.0.id, one.1, one.2)) {
        return Err(format!(
            "'{text}' must name two or more equal members: the same part, and the same number"
        ));
    }
    match (group.sharing, one) {
        (Sharing::Stages, (part, per_stage, 1, dilation)) => Ok((part, per_stage, count, dilation)),
        (sharing, (part, (1, _), 1, dilation)) if let Some(experts) = sharing.experts_by() => {
            Ok((part, (count, experts), 1, dilation))
        }
        _ => Err(format!(
            "'{text}' is not a valid group: tp: and ep: contain single devices; pp: contains devices or tp: or ep: groups"
        )),
    }
}

/// Why a model does not fit devices of a part, and as what it would.
pub(crate) fn does_not_fit(part: &Part, devices: u32, shape: &ModelShape, weights: Bytes) -> String {
    let each = part.memory_bytes().0;
    let of = |per_stage: u32, stages: u32| {
        let one = format!("sim:{}", part.id);
        let group = |word: &str, member: &str, count: u32| match count {
            1 => member.to_owned(),
            _ => format!("{word}:{}", vec![member; count as usize].join(",")),
        };
        let stage = group("tp", &one, per_stage);
        let stage = if per_stage > 1 && stages > 1 { format!("({stage})") } else { stage };
        group("pp", &stage, stages)
    };
    // a tenth of the remaining memory is enough to serve something
    let fits = |(per_stage, stages): &(u32, u32)| {
        shape.check_split(*per_stage).is_ok()
            && *stages <= shape.layers()
            && f64::from(per_stage * stages) * each * MEMORY_SHARE > 1.1 * weights.0
    };
    let all = DEVICES.into_iter().flat_map(|stages| DEVICES.map(|per_stage| (per_stage, stages)));
    let least = all.filter(fits).min_by_key(|(per_stage, stages)| (per_stage * stages, *stages));
    let would = least.map_or_else(
        || "64 devices do not hold it either".to_owned(),
        |(per_stage, stages)| format!("it fits as {}", of(per_stage, stages)),
    );
    let (weights, gb) = (weights.0 / GB, each / GB);
    format!(
        "the model does not fit: {weights:.1} GB of weights on {devices} x {gb:.0} GB, a tenth of it kept free; {would}"
    )
}

/// The steps of a group.
#[derive(Debug)]
struct GroupSteps {
    cost: CostModel,
    layers: u32,
    vocab: u32,
}

impl GroupTimes for GroupSteps {
    fn time(&self, batch: &[Cmd]) -> Option<Seconds> {
        self.cost.of_operations(batch.iter().map(|cmd| *cmd.sig()), (self.layers, self.vocab))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(selector: &str) -> SimGroup {
        SimGroup::of(selector).unwrap().unwrap()
    }

    #[test]
    fn groups_are_read_with_their_parentheses_and_others_are_left_to_others() {
        let shape = |selector: &str| {
            let of = group(selector);
            (of.part.id, of.per_stage, of.stages, of.attending.map(|(part, count)| (part.id, count)))
        };
        assert_eq!(shape("tp:sim:rtx-4090,sim:rtx-4090"), ("RTX-4090", 2, 1, None));
        assert_eq!(shape("pp:sim:L4,sim:L4#2,sim:l4"), ("L4", 1, 3, None));
        let two = "(tp:sim:RTX-4090,sim:RTX-4090)";
        assert_eq!(shape(&format!("pp:{two},{two}")), ("RTX-4090", 2, 2, None));
        assert_eq!(shape("attn:sim:L40S,sim:L4,sim:L4"), ("L40S", 1, 1, Some(("L4", 2))));
        let first = "attn:(tp:sim:L40S,sim:L40S),sim:L4";
        assert_eq!(shape(first), ("L40S", 2, 1, Some(("L4", 1))));
        assert_eq!(group("tp:sim:L4,dilation:0.1,sim:L4,dilation:0.1").dilation, 0.1);
        for other in
            ["cpu", "tp:cpu@0,cpu@1", "attn:cpu,sim:L4,compute", "sim:L4", "tp:cpu,sim:L4", "pp:cpu@0,cpu@1"]
        {
            assert_eq!(SimGroup::of(other).unwrap(), None, "{other}");
        }
    }

    #[test]
    fn what_is_no_group_is_said() {
        let says = |selector: &str, word: &str| {
            let error = SimGroup::of(selector).unwrap_err().to_string();
            assert!(error.contains(word) && error.contains(selector), "{error}");
        };
        says("tp:sim:L4", "two or more");
        says("tp:sim:L4,sim:L40S", "equal");
        says("pp:(tp:sim:L4,sim:L4),sim:L4", "equal");
        says("tp:(pp:sim:L4,sim:L4),(pp:sim:L4,sim:L4)", "is not a valid group");
        says("tp:sim:L5,sim:L5", "no part is called 'L5'");
        says("attn:sim:L4", "two devices");
        says("attn:sim:L4,(tp:sim:L4,sim:L4)", "single devices");
    }

    #[test]
    fn a_model_that_does_not_fit_is_told_what_it_would_fit() {
        let model = mixfleet_scheduler::models::find("llama-3.1-70b").unwrap();
        let shape = model.shape(mixfleet_hal::DType::Bf16);
        let said = does_not_fit(catalog::part("RTX-4090").unwrap(), 1, &shape, shape.weight_bytes(false));
        let eight = ["sim:RTX-4090"; 8].join(",");
        assert!(said.contains("141.1 GB") && said.contains(&format!("it fits as tp:{eight}")), "{said}");
    }
}
